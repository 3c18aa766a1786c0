"""Workloads of serving benchmarks: arrival times, requests, and statistics of the answers. Pure.

Everything is drawn from a seed; traces are read from text that the caller has opened. This package uses neither network
nor clock.
"""
