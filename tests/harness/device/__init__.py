"""A stand-in for a GPU: pages that only copies reach, and steps that are computed only when their results are needed.

Tests of workers on a device run on it. The stand-in computes with CPU kernels: it serves to test the order of copies
and steps, not the kernels.
"""
