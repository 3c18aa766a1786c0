"""The lifecycle of a sample as state machines: attempts, resumption, and the clean-up required in each state.

`retry_decision` decides whether a sample is retried after a failed call to a worker, and `sample_run` when.

Pure: must not import gRPC or asyncio. The explorer in `tests/harness` runs these classes too.
"""
