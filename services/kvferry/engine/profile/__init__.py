"""Recordings of steps: the times of phases, the plans, and the events between steps.

A recording observes an engine and changes nothing. This package must not import runners, models or gRPC.
"""
