"""Memory and arrays of steps: devices, paged KV and the flattened batch.

It must not contain scheduling decisions.
"""
