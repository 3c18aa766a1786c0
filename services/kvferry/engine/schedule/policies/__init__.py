"""Scheduling policies: which waiting sequence is admitted next, and which running sequence is preempted.

`policy` has the interface and the table of policies, and the other modules have the queues. Pure. A policy orders
sequences; it must not change them or hold pages, which is the scheduler's task.
"""
