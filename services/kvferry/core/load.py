"""The load of a worker, as used by its engine, the gateway, the operator and the metrics."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Counts of the resources in use by requests in a worker. Same fields as the message `kvferry.v1.WorkerLoad`."""

    running: int = 0
    """Number of sequences in the running batch."""
    waiting: int = 0
    """Number of sequences waiting for KV blocks or a batch slot."""
    loading: int = 0
    """Number of sequences waiting for KV from a peer or a tier."""
    blocks_total: int = 0
    blocks_free: int = 0
    """Number of KV blocks that are free or evictable."""
    blocks_quarantined: int = 0
    """Number of KV blocks that a transport may still write."""
    tickets_offered: int = 0
    tickets_claimed: int = 0
    transfers: int = 0
    """Number of KV reads in flight, including prefetches."""
    open_calls: int = 0
    """Number of Prefill, Decode and Inference calls in flight."""
    stores: int = 0
    """Number of storage objects whose pages are pinned until a tier has stored them."""
    exports: int = 0
    """Number of prompts whose pages are pinned for offers."""
    exported_blocks: int = 0
    """Number of pages pinned by exports; a page that is in several exports counts once for each."""
    tokens_to_compute: int = 0
    """Number of prompt tokens of waiting and running sequences that are not computed yet."""
    blocks_cached: int = 0
    """Number of KV blocks in the prefix cache, in use or evictable."""
    pins: int = 0
    """Number of pinned prefixes."""
    blocks_pinned: int = 0
    """Number of KV blocks that pinned and retained prefixes hold; a block in several of them counts once."""

    @property
    def num_requests(self) -> int:
        """Number of requests on the worker: running, waiting and loading."""
        return self.running + self.waiting + self.loading

    @property
    def num_tickets(self) -> int:
        """Number of tickets, offered or claimed, whose pages are pinned for a decode worker."""
        return self.tickets_offered + self.tickets_claimed

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV blocks in use, 0 to 1; 0 for a worker without blocks."""
        return 1 - self.blocks_free / self.blocks_total if self.blocks_total else 0.0
