"""Decisions of the gateway: routing, the map of caches, estimates, flow control, and the lifecycle of a sample.

Pure: no I/O, gRPC or asyncio; decisions follow from values and a clock, and the simulator runs the same modules. From
the top: `lifecycle`, `routing`, then `flow`, `estimates`, `cache_map`, and `config` with the settings.
"""
