"""The worker's part of a hand-off: open offers, prefetches of unfinished prompts, control calls to peers.

The state machines are in `kv.handoff`; these modules connect them to messages and the event loop.
"""
