"""Redis tier: framed objects stored as values in a Redis server or cluster, with a small RESP client.

Only `server_link` opens connections. Policies (breaker, hedging, slots) are in `kv.tiers.policy`.
"""
