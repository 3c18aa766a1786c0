"""Requests that the journal keeps: for which tenant and for how long."""

import json
from dataclasses import replace

import pytest

from kvferry.cli.commands.explain import report_lines
from kvferry.core.causes import ComputeCause, ComputedTokens
from kvferry.core.ids import RequestId, WorkerId
from kvferry.core.inference.chunks import KvReport, Timing
from kvferry.core.retention import Retention, RetentionOutcome
from kvferry.core.sampling import SamplingParams
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.decide.lifecycle.sample_states import SampleEvent
from kvferry.gateway.decide.routing.policies import OtherChoice
from kvferry.gateway.decide.routing.prefix_hash import PrefixHash
from kvferry.gateway.decide.routing.route_notes import route_notes
from kvferry.gateway.decide.routing.routes import Candidates, Replica, RouteRequest, choose
from kvferry.gateway.dispatch import journal as module
from kvferry.gateway.dispatch.journal import Journal
from kvferry.gateway.http.openai.reply import kv_line
from kvferry.serving.request import Caller, Request

LOADED = KvReport("p", "dram", 0, 128, 64, 1_000_000, 0.001, 0.05, False, 4, 1_000_000, 0.002, "disk: flipped bits")
COMPUTED = KvReport("d", "peer", 0, 32, 0, 500_000, 0.02, 0.001)


def a_run(name: str, tenant: str = "a", sample: int = 0) -> SampleRun:
    run = SampleRun(Request(Caller(RequestId(name), tenant), [1, 2, 3], SamplingParams(max_tokens=4), sample))
    replicas = [Replica(f"h:{i}", WorkerId(f"w{i}"), b"f", i) for i in range(2)]
    route = choose(RouteRequest(lambda _: b"key"), Candidates(tuple(replicas), tuple(replicas)), PrefixHash(1.25))
    assert route is not None
    run.routes = route_notes(route, "prefix-hash", [OtherChoice("random", "w0", "w1", 0.25)])
    run.report_kv((LOADED, COMPUTED))
    run.on(SampleEvent.CANCEL)
    return run


def test_a_request_is_found_by_its_own_tenant_only() -> None:
    journal = Journal()
    for sample in range(2):
        journal.add(a_run("r", sample=sample))
    found = journal.find("a", RequestId("r"))
    assert found is not None
    assert [s["sample_index"] for s in found] == [0, 1]
    assert journal.find("b", RequestId("r")) is None
    assert journal.find("a", RequestId("other")) is None


def test_a_request_with_several_prompts_is_referred_to_its_parts() -> None:
    journal = Journal()
    for number in range(2):
        journal.add(a_run(f"r-{number}"))
    journal.add(a_run("r-x"))
    missing = "request 'r' has a record for each of its prompts; use one of the ids r-0, r-1"
    assert journal.why_missing(RequestId("r"), "a") == journal.why_missing(RequestId("r")) == missing
    assert "not found: it is still running" in journal.why_missing(RequestId("r"), "b")
    assert "not found" in journal.why_missing(RequestId("other"), "a")


def test_the_oldest_are_forgotten(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(module, "_MAX_REQUESTS", 3)
    monkeypatch.setattr(module, "_MAX_SAMPLES", 2)
    journal = Journal()
    for number in range(5):
        journal.add(a_run(f"r{number}"))
    assert [journal.find("a", RequestId(f"r{n}")) is not None for n in range(5)] == [False, False, True, True, True]
    for sample in range(5):
        journal.add(a_run("r4", sample=sample))
    assert len(journal.find("a", RequestId("r4")) or []) == 2


def test_nothing_of_the_prompt_is_kept() -> None:
    journal = Journal()
    journal.add(a_run("r"))
    assert "token_ids" not in str(journal.find("a", RequestId("r")))


def test_the_record_names_workers_reasons_and_durations() -> None:
    journal = Journal()
    journal.add(a_run("r"))
    (sample,) = journal.find("a", RequestId("r")) or []
    story = "\n".join(report_lines("r", sample))
    assert "r  sample 0  cancelled" in story
    assert "loaded 64 tokens from position 0 (cheaper); expected: dram 1.0 ms, computing 50.0 ms" in story
    assert "4 blocks, 1.0 MiB in 2.0 ms; then disk: flipped bits" in story
    assert "computed 32 tokens" in story
    assert "pair by policy prefix-hash" in story
    assert "candidates" in story
    assert "random would take w0 and w1: 250.0 ms estimated" in story


def test_the_report_draws_the_time_line() -> None:
    journal = Journal()
    journal.add(a_run("r"))
    (sample,) = journal.find("a", RequestId("r")) or []
    times = {"queue_seconds": 0.1, "prefill_seconds": 0.3, "first_token_seconds": 0.4, "handoff_seconds": 0.1}
    moved = {"handoff_outcome": "fetched", "handoff_blocks": 1, "handoff_bytes": 3 << 20, "connector": "shm"}
    sample["timing"] |= {**times, **moved, "total_seconds": 1.5, "resumed": 1, "of_a_newer_gateway": 7}
    sample["routes"] = [*sample["routes"], *sample["routes"]]
    lines = report_lines("r", sample)
    assert "hand-off fetched 100.0 ms, decode 1000.0 ms, total 1500.0 ms, resumed 1 time" in "\n".join(lines)
    rows = {line.split()[0]: line for line in lines[lines.index("") + 1 :]}
    assert list(rows) == ["queue", "prefill", "first", "hand-off", "decode"]
    assert "400.0 ms" in rows["first"]
    assert rows["hand-off"].endswith("100.0 ms  fetched: 1 block, 3.0 MiB over shm")
    assert rows["decode"].index("█") > rows["prefill"].index("█")
    assert len([line for line in lines if "by policy" in line]) == len(sample["routes"]) // 2


def test_the_report_says_why_tokens_were_computed() -> None:
    journal, run = Journal(), a_run("r")
    run.note_computed((ComputedTokens(ComputeCause.PARTIAL_BLOCK, 7), ComputedTokens(ComputeCause.EVICTED, 64, 30.0)))
    run.note_computed((ComputedTokens(ComputeCause.EVICTED, 16, 99.0),))
    journal.add(run)
    (sample,) = journal.find("a", RequestId("r")) or []
    sample = json.loads(json.dumps(sample))
    assert sample["computed"] == [
        {"cause": "partial_block", "num_tokens": 7, "seconds": 0.0},
        {"cause": "evicted", "num_tokens": 80, "seconds": 30.0},
    ]
    sample["computed"].append({"cause": "of_a_newer_gateway", "num_tokens": 1, "seconds": 0.0})
    assert report_lines("r", sample)[2:5] == [
        "  computed   80 tokens: evicted (blocks whose pages were reused, 30 s ago)",
        "             7 tokens: partial_block (the last block, which is always computed)",
        "             1 token: of_a_newer_gateway (a cause that this version does not know)",
    ]
    del sample["computed"]  # by an older gateway
    assert not [line for line in report_lines("r", sample) if "evicted" in line]


def test_the_header_is_one_line_of_ascii() -> None:
    line = kv_line(Timing(kv=(LOADED, KvReport("wörker\n", "peer"))))
    assert line.isascii()
    assert "\n" not in line
    assert "dram at p: load 64 tokens" in line
    assert kv_line(Timing()) == "computed"


@pytest.mark.parametrize(
    ("retention", "line"),
    [
        (Retention(RetentionOutcome.RETAINED, 96, 3600.0), "retention  keeps 96 tokens for 3600 s"),
        (Retention(RetentionOutcome.QUOTA), "retention  keeps nothing: quota"),
        (None, None),
    ],
)
def test_the_report_says_what_is_kept(retention: Retention | None, line: str | None) -> None:
    journal, run = Journal(), a_run("r")
    run.timing = replace(run.timing, retention=retention)
    journal.add(run)
    (sample,) = journal.find("a", RequestId("r")) or []
    found = [one.strip() for one in report_lines("r", sample) if "retention" in one]
    assert found == ([] if line is None else [line])
