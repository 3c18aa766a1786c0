"""Redis tier: framed objects stored as values in a Redis server or cluster, with a small RESP client.

`redis_tier` follows the redirections of a cluster. Only `server_link` opens connections. Policies (breaker, hedging,
slots) are in `kv.tiers.policy`.
"""
