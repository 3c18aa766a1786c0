"""An adapter that must be read from its folder again never holds up the steps of other sequences."""

import queue
import threading
from pathlib import Path
from typing import Any

import pytest
from harness.kernels.lora_files import write

from kvferry.core.errors import ModelFileError
from kvferry.core.hashing import BlockNamers, cache_scope
from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason, SamplingParams
from kvferry.core.settings.engine import EngineSettings
from kvferry.engine import LLM, build
from kvferry.engine.build import build_engine, load_model, runner_for
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.messages import AdapterLoaded, EngineRequest, MaskReady
from kvferry.model import tiny

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


class HeldDisk:
    """Reads of adapters wait until the disk is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.released = threading.Event(), threading.Event()
        read = build.read_adapter

        def held(*args: Any, **kwargs: Any) -> Any:
            self.begun.set()
            assert self.released.wait(60)
            return read(*args, **kwargs)

        monkeypatch.setattr(build, "read_adapter", held)


Posted = queue.SimpleQueue[AdapterLoaded | MaskReady]


def an_engine(folder: Path) -> tuple[Engine, Posted]:
    """Return an engine whose only adapter has been evicted, and the queue of its owner."""
    adapters = (("a", str(folder)),)
    settings = EngineSettings("tiny", dtype="float32", kv_memory=8 << 20, adapters=adapters, adapter_memory=1)
    loaded = load_model(settings)
    posted: Posted = queue.SimpleQueue()
    return build_engine(loaded, runner_for(loaded), namers=BlockNamers(b"test"), post=posted.put), posted


def with_adapter(engine: Engine, name: str) -> EngineRequest:
    assert engine.adapters is not None
    adapter = engine.adapters.resolve("a")
    return EngineRequest(RequestId(name), PROMPT, GREEDY, scope=cache_scope("", "", adapter), adapter=adapter)


def take(engine: Engine, posted: Posted) -> None:
    """Pass the outcome of a load to the engine, as its owner does."""
    message = posted.get(timeout=60)
    assert isinstance(message, AdapterLoaded)
    engine.adapter_loaded(message.adapter, message.outcome)


def test_a_stream_ends_while_the_disk_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "a", tiny.config(), seed=1, rank=4)
    expected = LLM("tiny", dtype="float32", kv_memory=8 << 20, adapters={"a": str(folder)})
    engine, posted = an_engine(folder)
    disk = HeldDisk(monkeypatch)
    engine.add(EngineRequest(RequestId("base"), PROMPT, GREEDY))
    engine.add(with_adapter(engine, "adapted"))
    steps = 0
    while True:
        (update,) = engine.step().updates
        steps += 1
        assert (update.request_id, len(update.tokens)) == ("base", 1), "each step has a token of the stream"
        if update.finish_reason is not None:
            break
    assert steps == GREEDY.max_tokens
    assert disk.begun.wait(60)
    assert engine.step().updates == []
    assert engine.scheduler.num_waiting == 1
    disk.released.set()
    take(engine, posted)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token.token_id for update in engine.step().updates for token in update.tokens]
    assert tuple(tokens) == expected.generate([PROMPT], GREEDY, model="a")[0].token_ids
    assert engine.is_idle


def test_an_abort_while_the_disk_is_held_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, posted = an_engine(write(tmp_path / "a", tiny.config(), seed=1, rank=4))
    disk = HeldDisk(monkeypatch)
    engine.add(with_adapter(engine, "aborted"))
    assert engine.step().updates == []
    assert disk.begun.wait(60)
    assert engine.abort(RequestId("aborted"))
    disk.released.set()
    take(engine, posted)
    assert not engine.has_work
    assert engine.is_idle
    engine.check_integrity()


def test_a_folder_that_has_changed_fails_the_sequences_that_wait(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", tiny.config(), seed=1, rank=4)
    engine, posted = an_engine(folder)
    write(folder, tiny.config(), seed=2, rank=4)
    engine.add(EngineRequest(RequestId("base"), PROMPT, GREEDY))
    for name in ("one", "two"):
        engine.add(with_adapter(engine, name))
    engine.step()
    take(engine, posted)
    ended = {}
    while engine.has_work:
        for update in engine.step().updates:
            if update.error is not None or update.finish_reason is not None:
                ended[str(update.request_id)] = update.error or update.finish_reason
    assert ended.pop("base") is FinishReason.LENGTH
    assert sorted(ended) == ["one", "two"]
    assert all(isinstance(error, ModelFileError) and error.reason == "ADAPTER_CHANGED" for error in ended.values())
    assert engine.is_idle
