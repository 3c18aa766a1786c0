"""Model families: how the configuration of each differs from Llama's. A family is one module and one registry line.

Nothing here reads files or computes; the features of a family are fields of `ModelConfig`, which the engine implements
once for all families.
"""
