"""Reconciles `InferencePool` resources into running workers and gateways (docs/adr/0012-operator.md).

Read `spec`, `facts`, `rollout`, `status`: what is wanted, what is so, the next step, what is said. Then `reconcile`,
which puts them together, and `run`, the process. Decisions are pure; `api` alone talks to the Kubernetes API.
"""
