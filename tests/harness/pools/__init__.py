"""Helpers for tests of pools on a real node: apply, wait, send requests, inject failures."""
