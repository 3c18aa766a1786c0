"""A stand-in for a GPU: pages that only copies reach, and steps that are computed only when their results are needed.

Tests of workers on a device run on it. It computes with the kernels of the CPU; the order of copies and steps, not the
kernels, is what it tests.
"""
