"""Shared definitions: identifiers, errors with their HTTP and gRPC statuses, clocks, hashes, settings, metrics, state
tables.

Everything here is a value or a pure function of values. This package may import only the standard library and
`blake3`, so that all other packages and the explorer can use it.
"""
