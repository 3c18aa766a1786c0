"""The operator's process: leader election, watches, health and metrics endpoints, reports from gateways.

Decisions are in `operator.plan`.
"""
