"""Workloads of serving benchmarks: when requests arrive, what they ask for, and what their answers' times mean. Pure.

Everything is drawn from a seed; traces are read from text that the caller has opened. No network, no clock.
"""
