"""Decisions of the operator: rollouts, numbers of replicas, status; in `process`, leases and the work queue.

Pure functions from facts and a time to a list of actions. `kvferry operator plan` prints that list.
"""
