"""Memory and arrays of steps: paged KV, flattened batch, selection of device and dtype.

Only this package chooses between host memory and torch tensors. It must not contain scheduling decisions.
"""
