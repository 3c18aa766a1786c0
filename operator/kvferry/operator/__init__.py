"""The operator's place: it will reconcile `InferencePool` resources into running workers and gateways.

Decisions (what to create, roll, drain) are to be pure; only one module may talk to the Kubernetes API.
"""
