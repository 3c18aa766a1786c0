"""Runs one sample through prefill and decode workers, resumes it after a worker loss and records its route and timing.

Decisions are in `gateway.decide.lifecycle` and `gateway.decide.routing`; this package makes the calls and applies
deadlines and cancellations.
"""
