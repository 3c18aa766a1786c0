"""Decisions of the operator: rollouts, numbers of replicas, status. `plan.process` has leases and the work queue.

Without I/O: facts and a time determine the actions, which `kvferry operator plan` prints.
"""
