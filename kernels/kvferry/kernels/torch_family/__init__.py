"""Torch kernel backend: a few large torch calls per layer, for any device that torch supports.

It must agree with `kernels.reference` within the tolerance of `kernel_cases`.
"""
