"""Sources of the KV of a prompt's tokens: computed, cached, or loaded from a peer or a tier."""

from dataclasses import dataclass

from kvferry.core.inference.chunks import KvReport, Timing

_PEER = "peer"


@dataclass(frozen=True, slots=True)
class PromptSources:
    """Number of a prompt's tokens by the source of their KV on the worker that produced the first token. The first four
    sum to the length of the prompt."""

    computed: int = 0
    cached: int = 0
    """Already in the worker's prefix cache."""
    peer: int = 0
    """Fetched from another worker, for example the earlier turns of a conversation from their decode worker."""
    tier: int = 0
    """Loaded from DRAM, disk or Redis."""
    handed_off: int = 0
    """Fetched by the decode worker from the prefill worker; these tokens are also among the other four."""


def prompt_sources(prompt_tokens: int, cached_tokens: int, timing: Timing) -> PromptSources:
    """Split the tokens of a prompt by source, from the reports of the workers. Of a failed load, only the share of
    tokens whose bytes arrived is counted.

    Args:
        prompt_tokens: length of the prompt in tokens.
        cached_tokens: number of its tokens that were in the prefix cache.
        timing: the sample's timing, with its workers and their reports.
    """
    first = timing.prefill_worker or timing.decode_worker
    loaded = {"peer": 0, "tier": 0}
    handed_off = 0
    for report in timing.kv:
        count = _loaded(report)
        if timing.prefill_worker and report.worker_id != first:
            handed_off += count if report.source == _PEER else 0
        else:
            loaded["peer" if report.source == _PEER else "tier"] += count
    cached = min(cached_tokens, prompt_tokens)
    tier = min(loaded["tier"], prompt_tokens - cached)
    peer = min(loaded["peer"], prompt_tokens - cached - tier)
    computed = prompt_tokens - cached - tier - peer
    return PromptSources(computed, cached, peer, tier, min(handed_off, prompt_tokens))


def _loaded(report: KvReport) -> int:
    if not report.failure:
        return report.num_chosen if report.blocks_loaded else 0
    return int(report.num_chosen * min(1.0, report.bytes_loaded / report.num_bytes)) if report.num_bytes else 0
