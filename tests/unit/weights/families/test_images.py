"""Model classes for text and images: the text part is found in both generations of tensor names; no other part
is read.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from safetensors.numpy import save_file

from kvferry.core.errors import ModelFileError
from kvferry.model import tiny
from kvferry.model.source import open_model
from kvferry.weights.checkpoints.safetensors_dir import SafetensorsModel
from kvferry.weights.config import ModelConfig
from kvferry.weights.families.registry import FAMILIES, read_config
from kvferry.weights.tensors import EMBEDDING, HEAD, expected_shapes

WHERE = Path("/models/m/config.json")
IMAGES = {name: family for name, family in FAMILIES.items() if family.text is not None}
TEXT: dict[str, object] = {
    "model_type": "mistral",
    "vocab_size": 259,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "sliding_window": None,
    "eos_token_id": 258,
    "bos_token_id": 257,
}
GENERATIONS = {
    "older": lambda name: f"language_model.{name}",
    "newer": lambda name: name.replace("model.", "model.language_model.", 1),
}
VISION = {"older": "vision_tower.conv.weight", "newer": "model.vision_tower.conv.weight"}


def read(name: str, *, has_head: bool = False, **raw: object) -> ModelConfig:
    given = {"architectures": [FAMILIES[name].architecture], **raw}
    return read_config(json.loads(json.dumps(given)), "m", WHERE, has_head=has_head)


def write(folder: Path, generation: str, *, head: bool = True, **raw: object) -> dict[str, np.ndarray]:
    """Write a folder with a vision tensor; return the tensors of the text part by their names in a text model."""
    folder.mkdir(exist_ok=True)
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": TEXT, "vision_config": {}, **raw}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = expected_shapes(read("mistral3", has_head=True, text_config=TEXT))
    draw = np.random.default_rng(3)
    text = {n: draw.standard_normal(shape).astype(np.float32) for n, shape in shapes.items() if head or n != HEAD}
    tensors = {GENERATIONS[generation](name) if name != HEAD else _head(generation): v for name, v in text.items()}
    save_file(tensors | {VISION[generation]: np.ones((4, 3), np.float32)}, folder / "model.safetensors")
    return text


def _head(generation: str) -> str:
    return f"language_model.{HEAD}" if generation == "older" else HEAD


@pytest.mark.parametrize("generation", GENERATIONS)
def test_tensors_of_the_text_part_are_read_and_others_left_out(generation: str, tmp_path: Path) -> None:
    text = write(tmp_path, generation)
    model = SafetensorsModel(tmp_path)
    assert set(model.shapes()) == set(text)
    for name, values in text.items():
        np.testing.assert_array_equal(model.read(name), values)
    (line,) = model.weights()
    assert line == "vision_tower is left out (0.0 MiB): only the text part of the model is served"


def test_a_head_in_the_files_is_used_whatever_the_configuration(tmp_path: Path) -> None:
    for number, stated in enumerate(({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False})):
        text = write(tmp_path / str(number), "older", **stated)
        model = SafetensorsModel(tmp_path / str(number))
        assert not model.config.tie_word_embeddings
        np.testing.assert_array_equal(model.read(HEAD), text[HEAD])


def test_without_a_head_the_embedding_is_tied_unless_this_is_excluded(tmp_path: Path) -> None:
    for number, stated in enumerate(({}, {"tie_word_embeddings": True})):
        write(tmp_path / str(number), "newer", head=False, **stated)
        model = SafetensorsModel(tmp_path / str(number))
        assert model.config.tie_word_embeddings
        assert HEAD not in model.shapes()
        assert EMBEDDING in model.shapes()
    write(tmp_path / "untied", "newer", head=False, tie_word_embeddings=False)
    with pytest.raises(ModelFileError, match=r"1 tensors are missing \(lm_head.weight\)"):
        SafetensorsModel(tmp_path / "untied")


def test_vision_tensors_of_a_text_model_are_unknown(tmp_path: Path) -> None:
    write(tmp_path, "older")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MistralForCausalLM"], **TEXT}))
    with pytest.raises(ModelFileError, match="tensors are unknown for mistral"):
        SafetensorsModel(tmp_path)


def test_the_template_may_be_beside_the_processor(tmp_path: Path) -> None:
    write(tmp_path, "older")
    (tmp_path / "tokenizer.json").write_text(tiny.tokenizer(tiny.config())._make().to_str())
    assert open_model(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    source = open_model(str(tmp_path))
    assert source.chat_template is not None
    assert source.chat_template.render([{"role": "user", "content": "hi"}]) == "hi!"
    before = source.digest
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}?"}))
    assert open_model(str(tmp_path)).digest != before
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(ModelFileError, match=r"chat_template.json must contain a JSON object, not a list"):
        open_model(str(tmp_path))


CLASSES = {
    "gemma3": "Gemma3TextConfig",
    "mistral3": "MistralConfig",
    "qwen2_vl": "Qwen2VLTextConfig",
    "qwen2_5_vl": "Qwen2_5_VLTextConfig",
    "qwen3_vl": "Qwen3VLTextConfig",
}


@pytest.mark.parametrize("name", IMAGES)
def test_absent_fields_have_the_defaults_of_the_text_class(name: str) -> None:
    made = getattr(transformers, CLASSES[name])()
    assert read(name, has_head=True, text_config={}) == read(name, has_head=True, text_config=made.to_dict())


def test_a_flat_configuration_is_that_of_the_text_part() -> None:
    flat = {k: v for k, v in TEXT.items() if k != "model_type"} | {
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "rope_theta": 1e6,
    }
    outer = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}}
    config = read("qwen2_5_vl", **flat, **outer)
    assert config == read("qwen2_5_vl", text_config=flat, **outer)
    assert (config.rope_scaling, config.rope_theta, config.qkv_bias) == (None, 1e6, True)


def test_end_tokens_are_those_of_both_objects() -> None:
    assert read("mistral3", text_config=TEXT, eos_token_id=[1, 106]).eos_token_ids == (1, 106, 258)
    assert read("mistral3", text_config={**TEXT, "eos_token_id": None}, eos_token_id=7).eos_token_ids == (7,)
    assert read("gemma3", text_config={}).eos_token_ids == (1,)
    assert read("mistral3", text_config={**TEXT, "bos_token_id": None}, bos_token_id=5).bos_token_id == 5


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("gemma3", {}, "text_config is missing"),
        ("gemma3", {"text_config": [1]}, "text_config must be an object, not [1]"),
        (
            "mistral3",
            {"text_config": {**TEXT, "model_type": "ministral3"}},
            "text_config: model_type = 'ministral3' is not supported: the text part must be mistral",
        ),
        ("mistral3", {"text_config": {**TEXT, "hidden_size": "8"}}, "text_config: hidden_size must be a positive"),
        ("mistral3", {"text_config": {**TEXT, "rope_scaling": {"type": "mrope"}}}, "'mrope' is not supported"),
        ("qwen3_vl", {"text_config": {"attention_bias": True}}, "attention_bias = True is not supported"),
        ("qwen2_vl", {"text_config": TEXT}, "model_type = 'mistral' is not supported"),
        ("gemma3", {"text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping = 30.0 is not supp"),
        ("mistral3", {"text_config": TEXT, "is_causal": False}, "is_causal = False is not supported"),
        ("gemma3", {"text_config": {}, "tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_other_text_parts_are_refused(name: str, raw: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        read(name, **raw)
    assert str(WHERE) in str(caught.value)
    assert message in str(caught.value)
