"""Prompt tokens by the source of their KV."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.inference.chunks import KvReport, Timing
from kvferry.gateway.decide.lifecycle.prompt_sources import PromptSources, prompt_sources

HANDOFF = KvReport("d", "peer", num_tokens=96, num_chosen=96, num_bytes=960, blocks_loaded=6, bytes_loaded=960)
PAIR = Timing(prefill_worker="p", decode_worker="d")


def test_a_prompt_without_reports_is_cached_or_computed() -> None:
    assert prompt_sources(100, 32, PAIR) == PromptSources(computed=68, cached=32)


def test_a_hand_off_is_no_source_of_the_prompt() -> None:
    assert prompt_sources(100, 32, replace(PAIR, kv=(HANDOFF,))) == PromptSources(68, 32, handed_off=96)


def test_loads_of_the_first_worker_are_sources() -> None:
    tier = replace(HANDOFF, worker_id="p", source="dram", num_chosen=48)
    turns = replace(HANDOFF, worker_id="p", num_chosen=16)
    assert prompt_sources(100, 0, replace(PAIR, kv=(tier, turns, HANDOFF))) == PromptSources(36, 0, 16, 48, 96)


def test_a_decode_worker_without_a_prefill_worker_is_the_first() -> None:
    timing = Timing(decode_worker="d", kv=(HANDOFF,))
    assert prompt_sources(100, 0, timing) == PromptSources(computed=4, peer=96)


def test_the_loaded_part_of_a_failed_load_is_counted() -> None:
    half = replace(HANDOFF, worker_id="p", source="disk", bytes_loaded=480, failure="flipped bits")
    none = replace(half, num_bytes=0)
    declined = replace(HANDOFF, worker_id="p", num_chosen=0, blocks_loaded=0)
    assert prompt_sources(100, 0, replace(PAIR, kv=(half, none, declined))) == PromptSources(computed=52, tier=48)


COUNTS = st.integers(0, 1 << 20)
REPORTS = st.builds(
    KvReport,
    worker_id=st.sampled_from(["p", "d"]),
    source=st.sampled_from(["peer", "dram", "disk"]),
    num_chosen=COUNTS,
    num_bytes=COUNTS,
    blocks_loaded=COUNTS,
    bytes_loaded=COUNTS,
    failure=st.sampled_from(["", "lost"]),
)


@given(COUNTS, COUNTS, st.lists(REPORTS, max_size=5), st.sampled_from(["", "p"]))
def test_the_sources_add_up_for_any_reports(prompt: int, cached: int, reports: list[KvReport], prefill: str) -> None:
    timing = Timing(prefill_worker=prefill, decode_worker="d", kv=tuple(reports))
    found = prompt_sources(prompt, cached, timing)
    assert found.computed + found.cached + found.peer + found.tier == prompt
    assert min(found.computed, found.cached, found.peer, found.tier, found.handed_off) >= 0
    assert found.handed_off <= prompt
