"""Verdicts on what workers and certificates report, for the conditions of a pool's status. Pure.

Each module has one subject; `plan.status` combines all conditions. Must not import the API client.
"""
