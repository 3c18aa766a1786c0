"""The lifecycle of a sample as state machines: attempts, resumption, and the clean-up required in each state.

`sample_run` decides whether and when a sample is retried on another worker.

Pure: must not import gRPC or asyncio. The explorer in `tests/harness` runs these classes too.
"""
