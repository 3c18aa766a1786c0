"""Serving benchmark: sends a workload to an OpenAI-compatible server and measures its answers.

Knows HTTP and the clock; workloads and statistics are in `bench.workload`.
"""
