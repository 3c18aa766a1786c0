"""KV loads and stores of an engine: fetches from peers, KV prefetches, and lookups, loads and stores in tiers.

Use this package only on the engine's thread. Transports and tiers are used through `kv.interface`.
"""
