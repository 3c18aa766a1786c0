"""Kernels: model operations, with a reference implementation and optimized families for CPU and GPU.

`reference` defines the results; the other families must agree with it. Callers get a table of operations from
`ops.ops_for(device)`; code outside this package must not import a family's module.
"""
