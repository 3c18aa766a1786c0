"""Drafts of EAGLE and Medusa heads equal a direct float32 computation from the papers; outputs equal those of a run
without heads.
"""

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness.kernels.head_files import HEADS, KV_HEADS, eagle_tensors, write_eagle, write_medusa
from safetensors.torch import load_file

from kvferry.core.errors import ModelFileError, UsageError
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine import LLM
from kvferry.engine.execute.drafts import eagle_drafts
from kvferry.engine.execute.drafts.load_heads import load_heads
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.speculation.acceptance import MIN_CONFIDENCE
from kvferry.engine.schedule.speculation.matches import Tokens
from kvferry.engine.schedule.speculation.proposers import NO_DRAFT
from kvferry.engine.schedule.speculation.proposers import Draft as TextDraft
from kvferry.engine.schedule.speculation.settings import parse_speculation
from kvferry.engine.schedule.step.step import StepPlan, draft_tokens
from kvferry.model import tiny
from kvferry.weights.config import ModelConfig
from kvferry.weights.tensors import EMBEDDING, FINAL_NORM, HEAD

CONFIG = tiny.config()
PROMPTS = [[*b"abcabcabc abc", 40 + i, *range(40, 40 + 5 * i)] for i in range(4)]
KERNELS = {"compiled": {"weights": "float32"}, "torch": {"kernels": "torch"}}
Draft = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a sequence before a draft, and the draft."""


class Silent:
    """A proposer without proposals."""

    def propose(self, tokens: Tokens, limit: int) -> TextDraft:
        return NO_DRAFT


def a_model(speculation: str = "off", *, dtype: str = "float32", chunk: int = 64, **kernels: str) -> LLM:
    limits = SchedulerLimits(token_budget=64, max_chunk_tokens=chunk, max_num_seqs=4)
    return LLM("tiny", dtype=dtype, kv_memory=1 << 20, limits=limits, speculation=speculation, **kernels)  # type: ignore[arg-type]


def drafts_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[list[Draft], list[list[int]]]:
    """Return the drafts of the head, without those from the text, and the outputs of a run."""
    seen: list[Draft] = []
    assert llm.engine.speculation is not None
    llm.engine.speculation._proposer = Silent()

    def watch(plan: StepPlan) -> None:
        for s in plan.scheduled:
            if s.num_drafts:
                tokens = tuple(s.token_ids)
                seen.append((tokens[: len(tokens) - s.num_drafts], tuple(draft_tokens(s))))

    llm.runner.watch = watch
    return seen, [list(c.token_ids) for c in llm.generate(prompts, params)]


# ---------------------------------------------------------------------- direct computation from the papers


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate [heads, T, D] by position."""
    size, count = x.shape[-1], x.shape[1]
    angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def layer_of(
    w: dict[str, torch.Tensor], at: str, x: torch.Tensor, residual: torch.Tensor, heads: int, kv_heads: int
) -> torch.Tensor:
    """Compute a Llama layer after the norm of its input."""

    def project(name: str, count: int) -> torch.Tensor:
        y = F.linear(x, w[f"{at}self_attn.{name}_proj.weight"], w.get(f"{at}self_attn.{name}_proj.bias"))
        return y.view(len(x), count, -1).transpose(0, 1)

    q, k, v = project("q", heads), project("k", kv_heads), project("v", kv_heads)
    q, k = rotated(q), rotated(k)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=0) for t in (k, v))
    seen = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    residual = residual + F.linear(seen.transpose(0, 1).flatten(1), w[f"{at}self_attn.o_proj.weight"])
    y = norm(residual, w[f"{at}post_attention_layernorm.weight"])
    gate, up = (F.linear(y, w[f"{at}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return residual + F.linear(F.silu(gate) * up, w[f"{at}mlp.down_proj.weight"])


def model_tensors() -> dict[str, torch.Tensor]:
    tensors = tiny.TinyTensors(CONFIG)
    return {name: torch.tensor(tensors.read(name)) for name in tensors.shapes()}


MODEL = model_tensors()


def states_of(tokens: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the inputs of the layers of the tiny model, and its last hidden states after the final norm."""
    x = MODEL[EMBEDDING][tokens]
    inputs: list[torch.Tensor] = []
    for index in range(CONFIG.num_layers):
        inputs.append(x)
        at = f"model.layers.{index}."
        normed = norm(x, MODEL[f"{at}input_layernorm.weight"])
        x = layer_of(MODEL, at, normed, x, CONFIG.num_heads, CONFIG.num_kv_heads)
    return inputs, norm(x, MODEL[FINAL_NORM])


def best(logits: torch.Tensor) -> tuple[int, float]:
    shares = logits.softmax(-1)
    return int(shares.argmax()), float(shares.max())


def eagle_chain(folder: Path, tokens: list[int], count: int) -> list[int]:
    """Return the chain of an EAGLE or EAGLE-3 head after `tokens`, computed without KV."""
    w = load_file(folder / "model.safetensors")
    is_fused, at = "norm.weight" in w, "midlayer." if "norm.weight" in w else "layers.0."
    inputs, last = states_of(tokens)
    hidden = last[:-1]
    if is_fused:
        hidden = F.linear(torch.cat([inputs[i] for i in (0, 1, 1)], dim=-1), w["fc.weight"])[:-1]
    known, chain = list(tokens), list[int]()
    while len(chain) < count:
        embedded = MODEL[EMBEDDING][known[1:]]
        if is_fused:
            pair = (norm(embedded, w[f"{at}input_layernorm.weight"]), norm(hidden, w[f"{at}hidden_norm.weight"]))
            out = layer_of(w, at, torch.cat(pair, dim=-1), hidden, HEADS, KV_HEADS)
            token, confidence = best(F.linear(norm(out[-1], w["norm.weight"]), w["lm_head.weight"]))
            token += int(w["d2t"][token])
        else:
            x = F.linear(torch.cat((embedded, hidden), dim=-1), w["fc.weight"], w["fc.bias"])
            out = layer_of(w, at, x, x, HEADS, KV_HEADS)
            token, confidence = best(F.linear(out[-1], MODEL[HEAD if HEAD in MODEL else EMBEDDING]))
        if confidence < MIN_CONFIDENCE:
            break
        chain.append(token)
        known.append(token)
        hidden = torch.cat((hidden, out[-1:]))
    return chain


def medusa_chain(folder: Path, tokens: list[int], count: int) -> list[int]:
    """Return the chain of Medusa heads after `tokens`."""
    w = load_file(folder / "medusa_lm_head.safetensors")
    chain: list[int] = []
    for head in range(count):
        x = states_of(tokens)[1][-2]
        for block in range(2):
            x = x + F.silu(F.linear(x, w[f"{head}.{block}.linear.weight"], w[f"{head}.{block}.linear.bias"]))
        token, confidence = best(F.linear(x, w[f"{head}.2.weight"]))
        if confidence < MIN_CONFIDENCE:
            break
        chain.append(token)
    return chain


def sharper(model: ModelConfig, *, is_fused: bool, **changes: int) -> dict[str, np.ndarray]:
    """Return the tensor of an output head or `fc`, scaled so that most tokens are proposed with high confidence."""
    found = eagle_tensors(model, is_fused=is_fused, **changes)  # type: ignore[arg-type]
    name = "lm_head.weight" if is_fused else "fc.weight"
    return {name: 6.0 * found[name]}


# ---------------------------------------------------------------------- tests


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("is_fused", [False, True])
def test_drafts_are_those_of_a_direct_computation(is_fused: bool, kernels: str, tmp_path: Path) -> None:
    drafted = 120 if is_fused else None
    tensors = sharper(CONFIG, is_fused=is_fused, drafted=drafted) if is_fused else sharper(CONFIG, is_fused=False)
    folder = write_eagle(tmp_path, CONFIG, is_fused=is_fused, drafted=drafted, has_bias=is_fused, tensors=tensors)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [list(c.token_ids) for c in a_model(**KERNELS[kernels]).generate(PROMPTS, params)]
    seen, found = drafts_of(a_model(f"eagle={folder}?k=4&fixed=1", **KERNELS[kernels]), PROMPTS, params)
    assert found == expected
    assert len(seen) > 20
    assert max(len(draft) for _, draft in seen) == 4
    for tokens, draft in seen:
        assert list(draft) == eagle_chain(folder, list(tokens), 4)[: len(draft)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_medusa_drafts_are_those_of_a_direct_computation(kernels: str, tmp_path: Path) -> None:
    folder = write_medusa(tmp_path, CONFIG, heads=3, blocks=2)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [list(c.token_ids) for c in a_model(**KERNELS[kernels]).generate(PROMPTS, params)]
    seen, found = drafts_of(a_model(f"medusa={folder}?k=3&fixed=1", **KERNELS[kernels]), PROMPTS, params)
    assert found == expected
    assert len(seen) > 20
    assert max(len(draft) for _, draft in seen) == 3
    for tokens, draft in seen:
        assert list(draft) == medusa_chain(folder, list(tokens), 3)[: len(draft)]


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("compiled", "float32"), ("compiled", "bfloat16"), ("compiled", "int8"), ("torch", "float32")],
)
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa"])
def test_seeded_outputs_are_those_without_heads(
    method: str, width: int, dtype: str, kernels: str, tmp_path: Path
) -> None:
    is_fused = method == "eagle3"
    if method == "medusa":
        folder = write_medusa(tmp_path, CONFIG)
    else:
        folder = write_eagle(tmp_path, CONFIG, is_fused=is_fused, tensors=sharper(CONFIG, is_fused=is_fused))
    chosen = {} if kernels == "compiled" else KERNELS[kernels]  # with compiled kernels, the head has 8-bit weights
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=20, ignore_eos=True) for i in range(4)]
    prompts = [p * 3 for p in PROMPTS]
    expected = [c.token_ids for c in a_model(dtype=dtype, chunk=16, **chosen).generate(prompts, params)]
    speculation = f"{method.removesuffix('3')}={folder}?k=3&fixed=1&width={width}"
    llm = a_model(speculation, dtype=dtype, chunk=16, **chosen)
    steps: list[StepPlan] = []
    llm.runner.watch = steps.append
    assert [c.token_ids for c in llm.generate(prompts, params)] == expected
    assert any(item.parents for plan in steps for item in plan.scheduled) == (width > 1)
    assert llm.engine.speculation is not None
    assert llm.engine.speculation.counts.num_draft_tokens > 10
    assert llm.engine.is_idle
    assert llm.engine.speculation.is_idle
    again = [c.token_ids for c in llm.generate(prompts, params)]  # the hidden states of cached prefixes are missing
    assert again == expected
    assert llm.engine.speculation.is_idle


def test_vectors_of_prompts_are_those_without_a_head(tmp_path: Path) -> None:
    for method in ("eagle", "eagle3"):
        folder = write_eagle(tmp_path / method, CONFIG, is_fused=method == "eagle3")
        llm = a_model(f"eagle={folder}")
        for pooling in ("last", "mean"):
            expected = a_model().encode(PROMPTS, pooling=pooling)
            found = llm.encode(PROMPTS, pooling=pooling)
            for own, other in zip(found, expected, strict=True):
                assert np.array_equal(own.embedding, other.embedding)
        assert llm.engine.speculation is not None
        assert llm.engine.speculation.is_idle


def test_an_aborted_request_leaves_no_state(tmp_path: Path) -> None:
    llm = a_model(f"eagle={write_eagle(tmp_path, CONFIG, is_fused=True)}?fixed=1")
    llm.engine.add(EngineRequest(RequestId("a"), [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=40)))
    for _ in range(3):
        llm.engine.step()
    assert llm.engine.speculation is not None
    assert not llm.engine.speculation.is_idle
    llm.engine.abort(RequestId("a"))
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.engine.speculation.is_idle


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_head_that_does_not_fit_is_refused_at_start_by_name(kernels: str, tmp_path: Path) -> None:
    folder = write_eagle(tmp_path / "odd", CONFIG, is_fused=True, fields={"vocab_size": 1000})
    with pytest.raises(ModelFileError, match="vocab_size is 1000, but tiny needs 259"):
        a_model(f"eagle={folder}", **KERNELS[kernels])
    for name in ("none", "nu\0l"):
        with pytest.raises(
            ModelFileError, match=r"has no config\.json; in medusa=FOLDER, name the checkpoint"
        ) as raised:
            a_model(f"medusa={tmp_path}/{name}", **KERNELS[kernels])
        assert raised.value.field == "speculation"


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_head_with_the_largest_weights_has_the_same_tokens_and_no_warnings(
    method: str, width: int, tmp_path: Path
) -> None:
    size, largest = CONFIG.hidden_size, np.finfo(np.float32).max
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [c.token_ids for c in a_model().generate(PROMPTS, params)]
    for index, name in enumerate(
        ("fc", "norm", "midlayer.hidden_norm") if method == "eagle" else ("0.0.linear", "1.1")
    ):
        rows = {"fc": (size, 3 * size), "0.0.linear": (size, size), "1.1": (CONFIG.vocab_size, size)}
        tensors = {f"{name}.weight": np.full(rows.get(name, (size,)), largest, np.float32)}
        folder = tmp_path / str(index)
        if method == "eagle":
            write_eagle(folder, CONFIG, is_fused=True, tensors=tensors)
        else:
            write_medusa(folder, CONFIG, tensors=tensors)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            llm = a_model(f"{method}={folder}?fixed=1&width={width}")
            assert [c.token_ids for c in llm.generate(PROMPTS, params)] == expected, name


def test_head_sizes_that_the_compiled_kernels_lack_are_refused_with_others_that_have_them(tmp_path: Path) -> None:
    tensors = {
        f"layers.0.self_attn.{name}_proj.weight": np.zeros(shape, np.float32)
        for name, shape in {"q": (16, 48), "k": (8, 48), "v": (8, 48), "o": (48, 16)}.items()
    }
    folder = write_eagle(tmp_path, CONFIG, is_fused=False, fields={"head_dim": 8}, tensors=tensors)
    with pytest.raises(ModelFileError, match="head_dim is 8, but the compiled kernels support only multiples of 16"):
        a_model(f"eagle={folder}")
    assert a_model(f"eagle={folder}", kernels="torch").engine.speculation is not None


@pytest.mark.parametrize(
    ("kernels", "scale", "message"),
    [
        ("triton", 1.0, "heads need the compiled or torch kernels on a CPU, not 'triton' on cpu"),
        ("torch", 2.0, "heads are not supported for models that scale their embeddings, such as tiny"),
    ],
)
def test_models_without_heads_are_refused_by_name(kernels: str, scale: float, message: str, tmp_path: Path) -> None:
    config = replace(CONFIG, embedding_scale=scale)
    model = SimpleNamespace(config=config, kernels=kernels, device="cpu")
    with pytest.raises(UsageError, match=message):
        load_heads(parse_speculation(f"eagle={tmp_path}"), model)  # type: ignore[arg-type]


class EqualTimes:
    """A clock with which everything that is measured takes a millisecond."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 0.001
        return self._now

    def wall(self) -> float:
        return self._now


def test_drafts_become_short_if_none_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of any number of rows take equally long, and no token of a random head is accepted."""
    monkeypatch.setattr(eagle_drafts, "SystemClock", EqualTimes)
    llm = a_model(f"eagle={write_eagle(tmp_path, CONFIG, is_fused=False, tensors=sharper(CONFIG, is_fused=False))}")
    llm.engine._clock = EqualTimes()
    seen, _ = drafts_of(llm, [PROMPTS[0]], SamplingParams(temperature=1.0, seed=1, max_tokens=300, ignore_eos=True))
    assert seen, "some drafts are needed for measurements"
    assert sum(len(tokens) > 200 for tokens, _ in seen) < 20
