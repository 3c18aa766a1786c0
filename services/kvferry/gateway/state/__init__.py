"""The Redis server that the gateways of a pool share: its URL, calls of scripts, and the pool's names and seals."""
