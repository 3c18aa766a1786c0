"""Pinned prefixes: cached blocks that are not evicted until their time to live ends.

`pins` holds the blocks within a quota; `pinning` defines the quota, computes a prefix with an ordinary request and pins
its blocks.
"""
