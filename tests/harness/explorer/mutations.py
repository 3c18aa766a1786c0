"""All mutations: deliberate bugs that the explorer must detect; each breaks one rule.

Each mutation represents a class of bugs and, if known, links to a public issue in a different project.
"""

from harness.explorer import kv_mutations, worker_mutations
from harness.explorer.mutation import FOUND, Mutation

__all__ = ["MUTATIONS", "Mutation", "kv_mutations", "worker_mutations"]

MUTATIONS: tuple[Mutation, ...] = tuple(FOUND)
