"""Decisions of the operator: rollouts, numbers of replicas, status. `plan.process` contains leases and the work queue.

Performs no I/O: facts and a time determine the actions, which `kvferry operator plan` prints.
"""
