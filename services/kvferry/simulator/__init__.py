"""Simulator: serves a workload on a fleet of workers in virtual time, with the production classes for every decision.

Pure, and deterministic for a seed. Devices, links and failures are modeled here; schedulers, block pools, routing,
flow control and hand-offs are imported, never rewritten. This package must not import the code that calls them with
sockets, threads or devices.
"""
