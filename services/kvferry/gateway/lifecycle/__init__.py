"""The lifecycle of a sample as state machines: attempts, resumption, and the clean-up required in each state.

Pure: must not import gRPC or asyncio. The explorer in `tests/harness` runs these classes too.
"""
