"""Execution of a plan's actions against the Kubernetes API, and reads of objects that the plan needs but no watch
delivers. Only this package writes a pool's objects, through `operator.api`.
"""
