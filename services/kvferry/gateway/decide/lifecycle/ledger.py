"""Tokens that each tenant has used, by adapter: where the KV of prompts came from, and tokens generated.

Each answer of a worker is counted when it arrives, so that the rows together have what the workers have counted for
requests that they answered. The tokens of a prompt whose KV is handed over are counted for two workers: as computed,
cached or loaded for the first one, and as handed over for the second.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from kvferry.core.causes import AGAIN, ComputedTokens

MAX_ROWS = 1000
"""Number of rows with names; requests of further tenants and adapters are in one row."""


@dataclass(slots=True)
class LedgerRow:
    """Tokens of one tenant and adapter since the gateway's start."""

    tenant: str
    """Name of the tenant; empty for the default tenant."""
    adapter: str
    """Name of the adapter; empty for the base model."""
    is_others: bool = False
    """Whether this is the row of all tenants and adapters without a row."""
    computed_tokens: int = 0
    """Prompt tokens that workers computed, without those that were computed again on the same worker."""
    computed_again_tokens: int = 0
    """Prompt tokens computed again after a preemption or a change of the weights."""
    cached_tokens: int = 0
    """Prompt tokens in the cache of the worker."""
    loaded_tokens: int = 0
    """Prompt tokens that the worker of the first token loaded from a tier or another worker."""
    handed_off_tokens: int = 0
    """Prompt tokens that later workers of a request loaded, in hand-offs and after a loss."""
    output_tokens: int = 0


COLUMNS = tuple(asdict(LedgerRow("", "")))
"""Names of the columns."""


class Ledger:
    """The rows of one gateway. Not thread-safe."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        """
        Args:
            max_rows: see `MAX_ROWS`.
        """
        self._max_rows = max_rows
        self._rows: dict[tuple[str, str], LedgerRow] = {}
        self._others = LedgerRow("", "", is_others=True)

    def row(self, tenant: str, adapter: str) -> LedgerRow:
        """Return the row to which tokens of a tenant are added.

        Args:
            tenant: name of the tenant.
            adapter: name of the adapter; empty for the base model.
        """
        key = (tenant, adapter)
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= self._max_rows:
                return self._others
            row = self._rows[key] = LedgerRow(tenant, adapter)
        return row

    def rows(self) -> list[LedgerRow]:
        """Return the rows by tenant and adapter; that of the others last, if it is used."""
        rows = [self._rows[key] for key in sorted(self._rows)]
        return [*rows, self._others] if self._others != LedgerRow("", "", is_others=True) else rows


def count_answer(row: LedgerRow, num_prompt: int, num_cached: int, num_loaded: int, *, is_first: bool) -> None:
    """Add a worker's report on the KV of a prompt. A resumed request may have cached generated tokens, which are not
    counted.

    Args:
        row: row of the request.
        num_prompt: length of the prompt.
        num_cached: number of tokens in the worker's cache.
        num_loaded: number of tokens that the worker loaded.
        is_first: whether no worker has reported the prompt before.
    """
    cached = min(num_cached, num_prompt)
    loaded = min(num_loaded, num_prompt - cached)
    row.cached_tokens += cached
    if is_first:
        row.loaded_tokens += loaded
    else:
        row.handed_off_tokens += loaded


def count_computed(row: LedgerRow, computed: Iterable[ComputedTokens]) -> None:
    """Add computed tokens of a prompt."""
    for one in computed:
        if one.cause in AGAIN:
            row.computed_again_tokens += one.num_tokens
        else:
            row.computed_tokens += one.num_tokens
