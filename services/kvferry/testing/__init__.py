"""Conformance suites for connectors and tiers, independent of pytest.

May import any package; production code must not import it.
"""
