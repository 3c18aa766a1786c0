"""Shared definitions: identifiers, errors, clocks, hashes, settings, state tables.

Everything here is a value or a pure function of values. This package may import only the standard library and
`blake3`, so that all other packages and the explorer can use it.
"""
