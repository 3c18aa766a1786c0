"""Baselines of published comparisons, as variants of the production scheduler: reserved memory, static batches, no
sharing.

For experiments only. A baseline changes one decision and inherits the others. Production code must not import it.
"""
