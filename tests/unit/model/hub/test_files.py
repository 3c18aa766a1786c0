"""Only the files that are needed are chosen; what cannot be served is refused with what there is."""

import json

import pytest

from kvferry.core.errors import KvferryError, ModelFileError, UnknownModel
from kvferry.model import source
from kvferry.model.hub.files import (
    MAX_LISTED,
    SMALL,
    RepoFile,
    checked_files,
    gguf_files,
    is_gguf,
    small_files,
    weight_files,
)
from kvferry.model.hub.names import HubName

NAME = HubName("org/name")


def listing(*paths: str, size: int = 1) -> dict[str, RepoFile]:
    return checked_files(NAME, [RepoFile(path, size) for path in paths])


def paths(files: list[RepoFile]) -> list[str]:
    return [file.path for file in files]


def index(*names: str) -> bytes:
    return json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(names)}}).encode()


def test_a_safetensors_model_needs_its_own_files_only() -> None:
    files = listing(
        "README.md", "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "modeling.py",
        "pytorch_model.bin", "model.safetensors", "onnx/model.onnx", "tokenizer.model", "generation_config.json",
        "original/consolidated.00.pth", "consolidated.safetensors", "training_args.bin",
    )  # fmt: skip
    assert not is_gguf(NAME, files)
    assert paths(small_files(NAME, files)) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ]
    assert paths(weight_files(NAME, files, None)) == ["model.safetensors"]


def test_the_files_that_a_folder_is_opened_with_are_chosen() -> None:
    assert set(source._TOKENIZER_FILES) <= set(SMALL)


def test_the_index_names_the_weights() -> None:
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    files = listing(
        "config.json", "tokenizer.json", "model.safetensors.index.json", "model.safetensors", *shards, "o.safetensors"
    )
    assert "model.safetensors.index.json" in paths(small_files(NAME, files))
    assert paths(weight_files(NAME, files, index(*shards, shards[0]))) == shards


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{}", b'{"weight_map": 3}', b"\xff", b"[" * 100_000, index("../../evil.safetensors"),
        index("/etc/passwd"), index("modeling.py"), index("absent.safetensors"), index("sub/m.safetensors"),
    ],
)  # fmt: skip
def test_a_damaged_index_is_refused(content: bytes) -> None:
    files = listing("model.safetensors.index.json", "modeling.py", "sub/m.safetensors")
    with pytest.raises(ModelFileError, match=r"index\.json"):
        weight_files(NAME, files, content)


def test_paths_that_no_repository_has_are_left_out() -> None:
    strange = ["../config.json", "/config.json", "a/../../b.gguf", "a\\b.gguf", "", "a//b.gguf", "x\n.gguf", ".git/x"]
    assert listing(*strange, "config.json", "sub folder/m.gguf").keys() == {"config.json", "sub folder/m.gguf"}


def test_numbers_and_sizes_are_bounded() -> None:
    with pytest.raises(ModelFileError, match="at most 20000"):
        checked_files(NAME, [RepoFile(f"f{i}", 1) for i in range(MAX_LISTED + 1)])
    for size in (-1, 1 << 60):
        with pytest.raises(ModelFileError, match="gives no size"):
            weight_files(NAME, {"model.safetensors": RepoFile("model.safetensors", size)}, None)
    with pytest.raises(ModelFileError, match=r"config\.json has 1099511627776 bytes"):
        small_files(NAME, listing("config.json", "tokenizer.json", "model.safetensors", size=1 << 40))


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["config.json", "pytorch_model.bin"], r"can run code .*pytorch_model\.bin.*convert it to safetensors"),
        (["config.json", "pytorch_model-00001-of-00002.bin"], "convert it to safetensors"),
        (["config.json", "x-Q8_0.gguf"], r"has GGUF files \(Q8_0\); choose one .*org/name:Q8_0"),
        (["config.json", "tokenizer.json"], "no weights"),
        ([], "no weights"),
        (["model.safetensors", "tokenizer.json"], r"no config\.json"),
        (["model.safetensors", "config.json", "tokenizer.model"], r"no tokenizer\.json.*AutoTokenizer"),
    ],
)
def test_a_repository_without_safetensors_is_refused(files: list[str], told: str) -> None:
    with pytest.raises(ModelFileError, match=told) as caught:
        small_files(NAME, listing(*files))
    assert caught.value.field == "model"


KINDS = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-IQ2_XXS.gguf", "m-UD-Q4_K_XL.gguf", "m.bf16.gguf", "mmproj-F16.gguf"]


@pytest.mark.parametrize(
    ("quantization", "file"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"), ("q4_k_m", "m-Q4_K_M.gguf"), ("Q8_0", "m-Q8_0.gguf"), ("BF16", "m.bf16.gguf"),
        ("IQ2_XXS", "m-IQ2_XXS.gguf"), ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"), ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
    ],
)  # fmt: skip
def test_a_quantization_chooses_a_file(quantization: str, file: str) -> None:
    name = HubName("org/name", quantization)
    assert is_gguf(name, listing(*KINDS))
    assert paths(gguf_files(name, listing(*KINDS))) == [file]


@pytest.mark.parametrize("folder", ["", "Q4_K_M/", "BF16/"])
def test_all_parts_of_a_file_are_chosen(folder: str) -> None:
    parts = [f"{folder}m-Q4_K_M-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert paths(gguf_files(HubName("a/b", "Q4_K_M"), listing("m-Q8_0.gguf", *reversed(parts)))) == parts
    for missing in range(3):
        with pytest.raises(ModelFileError, match="2 of its 3 parts"):
            gguf_files(HubName("a/b", "Q4_K_M"), listing(*(part for i, part in enumerate(parts) if i != missing)))


def test_a_folder_may_have_the_quantization() -> None:
    parts = [f"Q8_0/m-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert paths(gguf_files(HubName("a/b", "Q8_0"), listing("Q4_0/m-00001-of-00001.gguf", *parts))) == parts


def test_the_only_file_needs_no_quantization() -> None:
    assert is_gguf(NAME, listing("anything.gguf"))
    assert paths(gguf_files(NAME, listing("anything.gguf", "mmproj-m.gguf"))) == ["anything.gguf"]


@pytest.mark.parametrize(
    ("quantization", "files", "told"),
    [
        ("", KINDS, "several GGUF models (IQ2_XXS, Q4_K_M, Q8_0, UD-Q4_K_XL, BF16); choose one: org/name:IQ2_XXS"),
        ("Q5_0", KINDS, "no quantization 'Q5_0' (IQ2_XXS, Q4_K_M, Q8_0, UD-Q4_K_XL, BF16); choose one"),
        ("Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "several GGUF models (a-Q8_0.gguf, b-Q8_0.gguf); download one"),
        ("Q8_0", ["a.gguf"], "no quantization 'Q8_0' (a.gguf); download one"),
        ("Q8_0", [f"m{i}.gguf" for i in range(100)], "and 76 more"),
    ],
)
def test_what_is_ambiguous_or_missing_lists_what_there_is(quantization: str, files: list[str], told: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        gguf_files(HubName("org/name", quantization), listing(*files))
    assert told in caught.value.message
    assert len(caught.value.message) < 1500


def test_a_quantization_of_a_safetensors_repository_is_refused() -> None:
    with pytest.raises(KvferryError, match="no GGUF files; use org/name without"):
        gguf_files(HubName("org/name", "Q8_0"), listing("config.json", "model.safetensors"))
