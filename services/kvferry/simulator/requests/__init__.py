"""Requests of a simulation: synthetic workloads and traces, one request at a time, and the tokens that they consist of.

A new kind of workload belongs here. This package must not import workers or the gateway.
"""
