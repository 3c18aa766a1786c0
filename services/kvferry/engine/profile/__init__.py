"""Recordings of steps: when each phase began, what was planned, and what arrived between the steps.

A recording observes an engine and changes nothing. This package must not import runners, models or gRPC.
"""
