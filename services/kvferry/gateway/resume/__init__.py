"""Streams that outlive their gateway: ids of events, and records of streams that all gateways of a pool share.

`event_ids` and `token_batches` are pure; only `stream_store` talks to Redis.
"""
