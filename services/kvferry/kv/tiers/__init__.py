"""Tiers keep named KV beyond an engine's pages: host DRAM, disk, Redis. One module each; they do not know each other.

All of them pass `kvferry.testing.tier_suite`, `dram` first: it is the definition of the others.
"""
