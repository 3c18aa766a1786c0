"""Kernels: model operations, with a reference implementation and optimized backends for CPU and GPU.

`reference` defines the results; the other backends must agree with it. Callers get a table of operations from
`ops.ops_for(device)`; code outside this package must not import a backend's module.
"""
