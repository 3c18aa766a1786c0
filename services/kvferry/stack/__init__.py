"""Runs the whole stack on one machine: starts, supervises, restarts and stops gateway and worker processes.

`plan.processes` and `plan.restarts` are pure and decide which processes run and when they restart; `supervisor` runs
them.
"""
