"""Random weights: the right shapes, reproducible by seed, and no file is read."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from harness.kernels.random_parity import differing_tokens

from kvferry.cli.main import main
from kvferry.core.errors import UnknownModel, UsageError
from kvferry.core.sampling import SamplingParams
from kvferry.engine import build
from kvferry.engine.execute.models.random_tensors import RandomTensors
from kvferry.engine.offline.llm import LLM
from kvferry.model import tiny
from kvferry.model.catalog import DEFAULT_MODEL
from kvferry.model.shapes import SHAPES, shape_of
from kvferry.model.source import open_model
from kvferry.weights.tensors import EMBEDDING, HEAD, expected_shapes

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5], list(range(40, 77)), [1, 2, 3]]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.2-1b", 1.236),
        ("qwen3-8b", 8.19),
        ("qwen2.5-7b", 7.62),
        ("smollm2-135m", 0.1345),
    ],
)
def test_shapes_have_as_many_parameters_as_published(name: str, billions: float) -> None:
    count = sum(math.prod(shape) for shape in expected_shapes(shape_of(name)).values())
    assert count / 1e9 == pytest.approx(billions, rel=2e-3)


def test_the_default_model_has_the_shape_of_its_file() -> None:
    config = open_model(DEFAULT_MODEL).config
    assert replace(config, eos_token_ids=(), bos_token_id=None) == SHAPES[DEFAULT_MODEL]


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownModel, match=r"unknown shape 'gpt-9' for --load-format dummy; use one of llama"):
        LLM("gpt-9", load_format="dummy")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_depend_on_seed_and_name_alone(dtype: torch.dtype) -> None:
    config = tiny.config(qk_norm=True)
    one, same, other = (RandomTensors(config, dtype=dtype, seed=seed) for seed in (3, 3, 4))
    norm = one.read("model.norm.weight")
    assert abs(float(norm.mean()) - 1.0) < 0.1
    for name, shape in one.shapes().items():
        values = one.draw(name)
        assert (values.dtype, tuple(values.shape)) == (dtype, shape)
        assert values.isfinite().all()
        assert torch.equal(values, same.draw(name))
        assert not torch.equal(values, other.draw(name))
    first, second = (one.draw(f"model.layers.{i}.mlp.up_proj.weight") for i in range(2))
    assert not torch.equal(first, second)


def test_projections_keep_the_magnitude_of_their_inputs() -> None:
    tensors = RandomTensors(SHAPES["smollm2-135m"], dtype=torch.float32)
    x = torch.randn(16, 576, generator=torch.Generator().manual_seed(0))
    for name in ("mlp.up_proj.weight", "self_attn.k_proj.weight"):
        out = x @ tensors.draw(f"model.layers.7.{name}").T
        assert float(out.std()) == pytest.approx(1.0, rel=0.1)


def test_bytes_and_numbers_are_those_drawn() -> None:
    tensors = RandomTensors(tiny.config(), dtype=torch.bfloat16)
    drawn = tensors.draw(HEAD)
    assert np.array_equal(tensors.read(HEAD), drawn.float().numpy())
    assert tensors.stored(HEAD).data.tobytes() == drawn.view(torch.uint8).numpy().tobytes()


def test_logits_of_a_tied_head_are_no_larger_than_of_its_own() -> None:
    config = tiny.config()
    tied = RandomTensors(replace(config, tie_word_embeddings=True), dtype=torch.float32)
    assert float(tied.draw(EMBEDDING).std()) == pytest.approx(
        float(RandomTensors(config, dtype=torch.float32).draw(HEAD).std()), rel=0.05
    )


def test_no_file_is_read_and_every_family_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "open_model", None)
    made = {
        kernels: [
            c.token_ids
            for c in LLM(
                "tiny",
                device="cpu",
                load_format="dummy",
                dtype="float32",
                kernels=kernels,
                kv_memory=4 << 20,
                threads=1,
            ).generate(PROMPTS, GREEDY)
        ]
        for kernels in ("torch", "compiled", "reference")
    }
    assert made["torch"] == made["compiled"] == made["reference"]
    assert len({tuple(tokens) for tokens in made["torch"]}) == len(PROMPTS)


def test_seeds_make_other_models() -> None:
    made = [
        LLM("tiny", load_format="dummy", device="cpu", kv_memory=4 << 20, seed=seed).generate(PROMPTS, GREEDY)
        for seed in (0, 0, 1)
    ]
    assert [c.token_ids for c in made[0]] == [c.token_ids for c in made[1]] != [c.token_ids for c in made[2]]
    assert made[0][0].text == ""


def test_text_is_refused_without_a_tokenizer() -> None:
    model = LLM("tiny", load_format="dummy", device="cpu", kv_memory=4 << 20)
    with pytest.raises(UsageError, match="loads no tokenizer; pass token ids instead of text"):
        model.generate(["hello"], GREEDY)
    with pytest.raises(UsageError, match="loads no tokenizer"):
        model.generate([[1, 2]], replace(GREEDY, stop=("x",)))
    assert not model.engine.has_work
    with pytest.raises(UsageError, match="load_format must be one of auto, dummy, not 'magic'"):
        LLM("tiny", load_format="magic")


def test_benchmarks_take_a_shape_by_name() -> None:
    small = ("--batch", "2", "--input-tokens", "9", "--output-tokens", "3", "--rounds", "1")
    place = ("--model", "tiny", "--load-format", "dummy", "--threads", "1", "--kv-memory", "8MiB")
    done = CliRunner().invoke(main, ["bench", "latency", *small, *place])
    assert done.exit_code == 0, done.output
    assert "batch 2" in done.output


@pytest.mark.parametrize("config", [tiny.config(), tiny.config(qk_norm=True), tiny.config(qkv_bias=True)])
def test_tokens_are_those_of_transformers(config: object) -> None:
    assert isinstance(config, type(tiny.config()))
    assert differing_tokens(config, "cpu", kernels="torch", prompts=3, prompt_tokens=20, new_tokens=8) == 0


def test_weights_drawn_for_kv_in_codes_are_bfloat16() -> None:
    drawn = LLM("tiny", load_format="dummy", device="cpu", dtype="int8", kernels="compiled", kv_memory=4 << 20)
    assert len(drawn.generate(PROMPTS, GREEDY)) == len(PROMPTS)
