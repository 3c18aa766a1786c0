"""Interfaces of the KV layer: `connector` between an engine and a transport, `tiering` between an engine and its tiers.

Every implementation passes the conformance suites of `kvferry.testing`. This package contains only types.
"""
