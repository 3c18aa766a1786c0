"""LoRA adapters in one engine: tokens are those of merged weights, however requests share batches, pages and slots."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.fakes.stepping import generate
from harness.kernels.lora_files import write

from kvferry.core.errors import InvalidRequest, KvferryError, ModelFileError, UnknownModel, UsageError
from kvferry.core.hashing import cache_scope
from kvferry.core.ids import AdapterId, RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine import LLM
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.messages import EngineRequest, PinnedPrefix
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny
from kvferry.model.source import open_model
from kvferry.weights.adapters.adapter_folder import Adapter, read_adapter
from kvferry.weights.config import ModelConfig
from kvferry.weights.tensors import F32, Shape, Stored, TensorSource, layer_prefix

KERNELS = ["torch", "compiled"]
NUM_ADAPTERS, NUM_ROWS = 8, 16
PROMPTS = [[(7 * row + 3 * i * i + i) % 250 for i in range(5 + 3 * row)] for row in range(NUM_ROWS)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Merged:
    """The tensors of a model with the updates of an adapter added."""

    def __init__(self, tensors: TensorSource, adapter: Adapter) -> None:
        self._tensors = tensors
        self._added = {
            f"{layer_prefix(layer)}{linear}.weight": update.b @ update.a
            for (layer, linear), update in adapter.updates.items()
        }

    def shapes(self) -> Mapping[str, Shape]:
        return self._tensors.shapes()

    def read(self, name: str) -> np.ndarray:
        return self._tensors.read(name) + self._added.get(name, np.float32(0))

    def stored(self, name: str) -> Stored:
        values = np.ascontiguousarray(self.read(name), dtype=np.float32)
        return Stored.plain(F32, values.reshape(-1).view(np.uint8), len(values))

    def weights(self) -> list[str]:
        return self._tensors.weights()

    def release(self) -> None:
        self._tensors.release()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root, config = tmp_path_factory.mktemp("adapters"), tiny.config()
    ranks = [1, 3, 4, 8, 8, 16, 2, 5]
    return {f"a{i}": str(write(root / f"a{i}", config, seed=i, rank=ranks[i])) for i in range(NUM_ADAPTERS)}


def an_llm(folders: Mapping[str, str], kernels: str = "compiled", **settings: Any) -> LLM:
    return LLM("tiny", dtype="float32", kernels=kernels, adapters=folders, **({"kv_memory": 8 << 20} | settings))


def merged_tokens(kernels: str, path: str, config: ModelConfig, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of a model whose weights have an adapter merged into them."""
    adapter = read_adapter(Path(path), config, max_rank=64)
    tensors: Any = Merged(open_model("tiny").tensors, adapter)
    model = build_model(config, tensors, dtype="float32", kernels=kernels)
    kv = PagedKv.allocate(KvLayout.of(config, block_tokens=16, dtype="float32"), 256)
    return [g.tokens[len(g.prompt) :] for g in generate(Runner(model, kv), prompts, GREEDY.max_tokens or 0)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_eight_adapters_in_a_batch_of_sixteen_are_merged_weights(folders: dict[str, str], kernels: str) -> None:
    llm = an_llm(folders, kernels, async_steps="on")
    names = [f"a{row % NUM_ADAPTERS}" for row in range(NUM_ROWS)]
    mixed = [out.token_ids for out in llm.generate(PROMPTS, GREEDY, model=names)]
    plain = [out.token_ids for out in llm.generate(PROMPTS, GREEDY)]
    assert sum(a != b for a, b in zip(mixed, plain, strict=True)) >= NUM_ROWS - 2, (
        "with an adapter, nearly all outputs differ from those of the base model"
    )
    for name, path in folders.items():
        rows = [row for row in range(NUM_ROWS) if names[row] == name]
        expected = merged_tokens(kernels, path, llm.config, [PROMPTS[row] for row in rows])
        assert [list(mixed[row]) for row in rows] == expected
    assert llm.engine.is_idle
    llm.engine.check_integrity()


@pytest.mark.parametrize("kernels", KERNELS)
def test_chunks_preemption_and_cached_prefixes_change_nothing(folders: dict[str, str], kernels: str) -> None:
    names = [f"a{row % NUM_ADAPTERS}" for row in range(NUM_ROWS)]
    expected = [
        an_llm(folders, kernels).generate([prompt], GREEDY, model=name)[0].token_ids
        for prompt, name in zip(PROMPTS[:4], names, strict=False)
    ]
    limits = SchedulerLimits(token_budget=24, max_chunk_tokens=7, max_mixed_tokens=5)
    chunked = an_llm(folders, kernels, limits=limits)
    outs = chunked.generate(PROMPTS, GREEDY, model=names)
    assert [out.token_ids for out in outs[:4]] == expected
    again = chunked.generate(PROMPTS, GREEDY, model=names)
    assert [out.token_ids for out in again] == [out.token_ids for out in outs]
    assert all(out.num_cached_tokens >= len(p) - 1 - 16 for out, p in zip(again, PROMPTS, strict=True))
    scarce = an_llm(folders, kernels, kv_memory=14 * chunked.block_bytes, limits=SchedulerLimits(max_num_seqs=16))
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    crowded = scarce.generate(PROMPTS, long, model=names)
    assert scarce.engine.scheduler.num_preemptions > 0
    assert [out.token_ids[:12] for out in crowded] == [out.token_ids for out in outs]
    assert scarce.engine.is_idle
    assert scarce.engine.scheduler.slots.num_users == 0


def test_a_row_does_not_depend_on_its_neighbours(folders: dict[str, str]) -> None:
    """The compiled kernels give the same bits with any other rows in the batch."""
    llm = an_llm(folders, "compiled")
    drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=12, logprobs=2, ignore_eos=True)
    alone = llm.generate([PROMPTS[5]], drawn, model="a3")[0]
    llm.engine.reset_prefix_cache()
    names = [["a3", "", "a1", "a3"][row % 4] for row in range(NUM_ROWS)]
    names[5] = "a3"
    among = llm.generate(PROMPTS, drawn, model=names)[5]
    assert among.token_ids == alone.token_ids
    assert among.logprobs == alone.logprobs


def test_samples_of_one_prompt_share_its_adapters_blocks(folders: dict[str, str]) -> None:
    llm = an_llm(folders)
    assert llm.engine.adapters is not None
    adapter = llm.engine.adapters.resolve("a2")
    prompt = [i % 200 for i in range(70)]
    outputs: dict[str, list[int]] = {}
    cached: dict[str, int] = {}
    for index in range(4):
        params = SamplingParams(temperature=1.0, seed=9, max_tokens=6, ignore_eos=True)
        scope = cache_scope("", "", adapter)
        llm.engine.add(
            EngineRequest(RequestId(f"s{index}"), prompt, params, sample_index=index, scope=scope, adapter=adapter)
        )
    while llm.engine.has_work:
        for update in llm.engine.step().updates:
            outputs.setdefault(update.request_id, []).extend(token.token_id for token in update.tokens)
            cached[update.request_id] = update.num_cached
    assert len({tuple(tokens) for tokens in outputs.values()}) == 4
    assert sorted(cached.values()) == [0, 64, 64, 64]


def test_kv_of_one_version_is_used_by_no_other(folders: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "swapped"
    shutil.copytree(folders["a1"], folder)
    llm = an_llm({"x": str(folder), "same-content": folders["a1"]})
    prompt = [list(range(100))]
    first = llm.generate(prompt, GREEDY, model="x")[0]
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY, model="same-content")[0].num_cached_tokens == 0, (
        "the cache scope includes the adapter's name"
    )
    assert llm.generate(prompt, GREEDY, model="x")[0].num_cached_tokens == 96
    shutil.copytree(folders["a4"], folder, dirs_exist_ok=True)
    llm.load_adapter("x", str(folder))
    replaced = llm.generate(prompt, GREEDY, model="x")[0]
    assert replaced.num_cached_tokens == 0
    assert replaced.token_ids == an_llm({"x": folders["a4"]}).generate(prompt, GREEDY, model="x")[0].token_ids
    assert replaced.token_ids != first.token_ids
    llm.load_adapter("x", folders["a1"])
    back = llm.generate(prompt, GREEDY, model="x")[0]
    assert back.token_ids == first.token_ids
    assert back.num_cached_tokens == 96, "the cache scope depends on the adapter's content, not on the time of loading"


def test_a_prefix_is_pinned_with_its_adapter_until_the_version_is_replaced(folders: dict[str, str]) -> None:
    llm = an_llm({"x": folders["a1"]})
    assert llm.engine.adapters is not None
    adapter = llm.engine.adapters.resolve("x")
    replies: list[PinnedPrefix | KvferryError] = []
    request = EngineRequest(
        RequestId("p"), list(range(100)), GREEDY, scope=cache_scope("", "", adapter), adapter=adapter
    )
    llm.engine.pinning.pin(request, 60.0, replies.append)
    while llm.engine.has_work:
        llm.engine.step()
    (pin,) = replies
    assert isinstance(pin, PinnedPrefix)
    assert (pin.num_tokens, llm.engine.load().pins) == (96, 1)
    assert llm.generate([list(range(100))], GREEDY, model="x")[0].num_cached_tokens == 96
    llm.load_adapter("x", folders["a1"])
    assert llm.engine.load().pins == 1, "the same content is the same version"
    llm.load_adapter("x", folders["a2"])
    assert llm.engine.load().pins == 0
    assert llm.engine.is_idle


def test_running_requests_keep_the_version_they_began_with(folders: dict[str, str]) -> None:
    llm = an_llm({"x": folders["a1"]})
    expected = llm.generate(PROMPTS[:1], GREEDY, model="x")[0].token_ids
    llm.engine.reset_prefix_cache()
    assert llm.engine.adapters is not None
    old = llm.engine.adapters.resolve("x")
    llm.engine.add(EngineRequest(RequestId("r"), PROMPTS[0], GREEDY, scope=cache_scope("", "", old), adapter=old))
    found: list[int] = []
    for step in range(100):
        if step == 3:
            llm.load_adapter("x", folders["a2"])
        if step == 6:
            llm.unload_adapter("x")
        found += [token.token_id for update in llm.engine.step().updates for token in update.tokens]
        if not llm.engine.has_work:
            break
    assert found == list(expected)
    late = EngineRequest(RequestId("s"), PROMPTS[0], GREEDY, scope=cache_scope("", "", old), adapter=old)
    llm.engine.add(late)  # a request may have begun on another worker before the adapter was unloaded
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.adapters.trim((), llm.engine.scheduler.slots.holds, now=math.inf)
    with pytest.raises(UnknownModel, match="not loaded here"):
        llm.engine.add(late)
    with pytest.raises(UnknownModel, match="'x' is not served"):
        llm.generate(PROMPTS[:1], GREEDY, model="x")
    assert llm.engine.is_idle


def test_two_hundred_adapters_share_eight_slots(folders: dict[str, str]) -> None:
    many = {f"n{i}": folders[f"a{i % NUM_ADAPTERS}"] for i in range(200)}
    llm = an_llm(many, adapter_slots=8, adapter_memory=1 << 20, limits=SchedulerLimits(max_num_seqs=32))
    names = [f"n{i}" for i in range(200)]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    outs = llm.generate([[i % 250, 1, 2] for i in range(200)], params, model=names)
    assert all(len(out.token_ids) == 3 for out in outs)
    slots = llm.engine.scheduler.slots
    assert (slots.num_activations, slots.num_evictions, slots.num_users) == (200, 192, 0)
    assert llm.engine.adapters is not None
    assert llm.engine.adapters.num_loads > 100, "adapters beyond the memory limit are evicted and loaded again"
    assert llm.engine.adapters.num_bytes <= (1 << 20) + 8 * (1 << 18)
    assert llm.engine.is_idle


def test_an_adapter_that_cannot_be_loaded_again_fails_only_its_requests(
    folders: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(folders["a1"], tmp_path / "gone")
    llm = an_llm({"gone": str(tmp_path / "gone"), "good": folders["a2"]}, adapter_memory=1)
    shutil.rmtree(tmp_path / "gone")
    errors: dict[str, Exception | None] = {}
    assert llm.engine.adapters is not None
    for name in ("gone", "good"):
        adapter = llm.engine.adapters.resolve(name)
        scope = cache_scope("", "", adapter)
        llm.engine.add(EngineRequest(RequestId(name), PROMPTS[0], GREEDY, scope=scope, adapter=adapter))
    while llm.engine.has_work:
        for update in llm.engine.step().updates:
            errors[update.request_id] = update.error
    assert isinstance(errors["gone"], ModelFileError)
    assert errors["good"] is None
    assert llm.engine.is_idle
    llm.engine.check_integrity()


def test_the_scope_must_be_one_of_the_adapter(folders: dict[str, str]) -> None:
    llm = an_llm(folders)
    assert llm.engine.adapters is not None
    adapter = llm.engine.adapters.resolve("a1")
    other = AdapterId("a1", bytes(32))
    for tenant, given in (
        (cache_scope("t", "", adapter), None),
        ("t", adapter),
        (cache_scope("t", "", other), adapter),
    ):
        with pytest.raises(InvalidRequest, match="scope"):
            llm.engine.add(EngineRequest(RequestId("r"), [1], GREEDY, scope=tenant, adapter=given))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapter_slots": 0}, "adapters need slots"),
        ({"max_adapter_rank": 0}, "max_adapter_rank must be a whole number from 1 to 256, not 0"),
        ({"max_adapter_rank": 257}, "not 257"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folders: dict[str, str], settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        an_llm({"a1": folders["a1"]}, **settings)


def test_names_are_checked(folders: dict[str, str]) -> None:
    for name in ("", "tiny", "a\nb", "x" * 129):
        with pytest.raises(UsageError, match="name"):
            an_llm({name: folders["a1"]})
    with pytest.raises(UnknownModel, match="'a9' is not served here"):
        an_llm(folders).generate(PROMPTS[:1], GREEDY, model="a9")


def test_drafts_change_no_token_of_requests_with_adapters(folders: dict[str, str]) -> None:
    repetitive = [[5, 6, 7, 8 + row] * 4 for row in range(8)]
    names = [f"a{row}" if row % 3 else "" for row in range(8)]
    longer = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = [out.token_ids for out in an_llm(folders).generate(repetitive, longer, model=names)]
    llm = an_llm(folders, speculation="ngram?k=4&min=1")
    assert [out.token_ids for out in llm.generate(repetitive, longer, model=names)] == expected
    assert llm.engine.speculation is not None
    assert llm.engine.speculation.counts.num_accepted_tokens > 0
    assert llm.engine.is_idle
