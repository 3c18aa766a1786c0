"""Recordings of steps: when each phase began, what was planned, and what arrived between the steps.

A recording observes an engine and changes nothing. This room must not know runners, models or gRPC.
"""
