"""Serving benchmark: sends a workload to an OpenAI-compatible server and measures its answers.

Only this package uses HTTP and the clock; workloads and statistics are in `bench.workload`.
"""
