"""The machine broken on purpose, one rule at a time. Each must be noticed, or the explorer does not look.

Every mutation stands for a class of bug; threads are named where others met the class in public.
"""

from kvferry.testing.explorer import kv_mutations, worker_mutations
from kvferry.testing.explorer.mutation import FOUND, Mutation

__all__ = ["MUTATIONS", "Mutation", "kv_mutations", "worker_mutations"]

MUTATIONS: tuple[Mutation, ...] = tuple(FOUND)
