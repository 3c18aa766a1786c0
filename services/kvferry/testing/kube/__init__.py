"""A real Kubernetes on this machine for the tests in tests/cluster: a control plane, and a node for whoever is root."""
