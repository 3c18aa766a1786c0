"""KV tiers beyond an engine's pages: host DRAM, disk and Redis. They do not depend on each other.

All tiers pass `kvferry.testing.tier_suite`; `dram` is the reference implementation.
"""
