"""The gateway's view of its workers: discovery, one status poller per worker, readiness, held requests.

Only this package opens connections to workers and to a cluster's API server.
"""
