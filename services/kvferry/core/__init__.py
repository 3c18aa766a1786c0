"""The vocabulary: identifiers, errors, clocks, hashes, settings, state tables.

Everything here is a value or a pure function of values. Only the standard library and `blake3`
may be imported, so that every other package, the simulator included, can use these words.
"""
