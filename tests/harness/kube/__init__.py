"""A local Kubernetes cluster for the tests in tests/cluster: a control plane and, if run as root, a node."""
