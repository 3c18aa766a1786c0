"""KV page management: block pool, block tables, layer groups with windows, prefix index.

Pure. `check_integrity` states the invariants, and property tests run it after every step. This package must not depend
on scheduling, tensors or transports.
"""
