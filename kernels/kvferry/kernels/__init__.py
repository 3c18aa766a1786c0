"""The operations a model is made of, once as a definition and again as fast families.

`reference` is the definition; the other families must agree with it. Callers ask `ops.ops_for(device)` and use
the table they get; nothing outside this package names a family's module.
"""
