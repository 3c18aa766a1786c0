"""Kubernetes operator: reconciles `InferencePool` resources into running workers and gateways
(docs/adr/0012-operator.md).

Suggested reading order: `pool` (spec and facts), `plan.pool_plan` (facts to actions), `plan.rollout`, `plan.status`,
`apply.executor` (actions to API calls), `reconcile`, which calls them in order, and `process.run`. Decisions are pure;
only `api` calls the Kubernetes API.
"""
