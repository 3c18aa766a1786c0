"""Opens a model by name or path: configuration, tensors, tokenizer, chat template, digest."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvferry.core.errors import ModelFileError, UnknownModel, shortened
from kvferry.model import tiny
from kvferry.model.catalog import CATALOG, embedded
from kvferry.model.fetch import Progress, fetch, file_sha256
from kvferry.model.hub.download import fetch_hub_model, hub_name
from kvferry.text.templates.chat_template import ChatTemplate
from kvferry.text.tokenizing.gguf.header_tokenizer import tokenizer_from_gguf
from kvferry.text.tokenizing.tokenizer import Tokenizer
from kvferry.text.tokenizing.tokenizer_files import tokenizer_from_json
from kvferry.weights.checkpoints.gguf.gguf_model import GgufModel
from kvferry.weights.checkpoints.gguf.parts import part_paths
from kvferry.weights.checkpoints.safetensors_dir import SafetensorsModel, read_json
from kvferry.weights.config import ModelConfig
from kvferry.weights.files.regular_file import is_present, read_file
from kvferry.weights.tensors import TensorSource

_TEMPLATE = "chat_template"
_END_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<start_function_response>",
)
"""Control tokens with which chat templates end a turn. A checkpoint that does not list the one of its template would
write the user's next turn."""
_CHANNEL = "<|channel|>"
"""Templates with it end a message, not a turn, with `<|end|>` (harmony)."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", f"{_TEMPLATE}.jinja", f"{_TEMPLATE}.json")


class ModelSource:
    """An open model. Only `tensors.read` reads weights."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        tensors: TensorSource,
        digest: Callable[[], str],
    ) -> None:
        """
        Args:
            config: configuration of the model.
            tokenizer: tokenizer of the model.
            chat_template: the model's chat template; `None` for a base model without a template.
            tensors: the weights, not read yet.
            digest: computes the digest of the model's files.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        """The model's chat template; `None` for a base model without a template."""
        self.tensors = tensors
        self._digest = digest

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the content of the model's files, 64 hex digits; the first use reads all files."""
        return self._digest()


def open_model(
    spec: str, *, served_name: str = "", cache: Path | None = None, progress: Progress | None = None
) -> ModelSource:
    """Open a model; fetch it first if its name is in the catalog, or one of the Hugging Face Hub.

    Args:
        spec: a name in the catalog, `tiny`, a path ending in `.gguf`, a Hugging Face folder, or
            `ORG/NAME[:QUANTIZATION][@REVISION]`; an existing folder `ORG/NAME` comes before the hub.
        served_name: model name for clients; empty selects the name in the model's files, or `ORG/NAME`.
        cache: folder for fetched files of the catalog; `None` selects `core.process.config.cache_dir()`.
        progress: callback for the progress of a download; `None` for no reports.

    Raises:
        UnknownModel: `spec` is neither a known name nor an existing path, or the hub has no such model.
        Unavailable: the hub cannot be reached, and the model is not in its cache.
        ModelFileError: the files are missing, damaged or not supported.
        UsageError: the quantization or the revision is invalid.
    """
    source = _open(spec, cache, progress)
    if served_name:
        source.config = replace(source.config, name=served_name)
    return source


def _open(spec: str, cache: Path | None, progress: Progress | None) -> ModelSource:
    if spec == tiny.NAME:
        config = tiny.config()
        tensors = tiny.TinyTensors(config)
        template = ChatTemplate(tiny.CHAT_TEMPLATE)
        return ModelSource(config, tiny.tokenizer(config), template, tensors, tensors.digest)
    if spec in CATALOG:
        model = embedded(spec)
        return _open_gguf(fetch(model, cache=cache, progress=progress), model.name, lambda: model.sha256)
    name = hub_name(spec)
    if name is not None:
        found = fetch_hub_model(name, progress=progress)
        opened = _open_folder(found.path) if found.path.is_dir() else _open_gguf_file(found.path)
        opened.config = replace(opened.config, name=name.served)
        return opened
    path = Path(spec)
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name that is too long, or a folder that may not be searched
        raise ModelFileError(f"cannot open model {shortened(spec)!r}: {error.strerror}") from error
    if is_folder:
        return _open_folder(path)
    if path.suffix == ".gguf":
        return _open_gguf_file(path)
    known = ", ".join([*CATALOG, tiny.NAME])
    raise UnknownModel(
        f"model {spec!r} is not a known name ({known}), ORG/NAME on the Hugging Face Hub, a .gguf file or a folder",
        field="model",
    )


def _open_gguf_file(path: Path) -> ModelSource:
    return _open_gguf(path, None, lambda: _digest_of(part_paths(path)))


def _open_gguf(path: Path, name: str | None, digest: Callable[[], str]) -> ModelSource:
    model = GgufModel(path, name)
    tokenizer = tokenizer_from_gguf(model.pairs, model.config, str(path))
    source = model.pairs.get("tokenizer.chat_template")
    template = _template(source, tokenizer) if isinstance(source, str) else None
    return _with_ends(ModelSource(model.config, tokenizer, template, model, digest))


def _open_folder(folder: Path) -> ModelSource:
    model = SafetensorsModel(folder)
    settings_file = folder / "tokenizer_config.json"
    settings = read_json(settings_file) if is_present(settings_file) else {}
    tokenizer = tokenizer_from_json(folder / "tokenizer.json", model.config, settings)
    source = settings.get(_TEMPLATE)
    template_file, processor_file = (folder / f"{_TEMPLATE}{suffix}" for suffix in (".jinja", ".json"))
    if is_present(template_file):
        source = read_file(template_file).decode("utf-8", "replace")
    elif source is None and is_present(processor_file):  # multimodal checkpoints have the template in a separate file
        source = read_json(processor_file).get(_TEMPLATE)
    if isinstance(source, list):  # several templates by name; use the one for plain chat
        source = next((i.get("template") for i in source if isinstance(i, dict) and i.get("name") == "default"), None)
    bos, eos, pad, unk = (_token_text(settings.get(f"{name}_token")) for name in ("bos", "eos", "pad", "unk"))
    template = None
    if isinstance(source, str):
        template = ChatTemplate(source, bos_token=bos, eos_token=eos, pad_token=pad, unk_token=unk)

    return _with_ends(ModelSource(model.config, tokenizer, template, model, lambda: _digest_of_folder(model)), eos)


def _digest_of_folder(model: SafetensorsModel) -> str:
    names = ("config.json", *_TOKENIZER_FILES)
    files = [model.path / names[0], *model.weight_files, *(model.path / name for name in names[1:])]
    return _digest_of(files)


@dataclass(frozen=True, slots=True, eq=False)
class WeightSource:
    """An open checkpoint, whose tokenizer is not read and may be missing."""

    config: ModelConfig
    tensors: TensorSource
    digest: Callable[[], str]
    """Computes `ModelSource.digest`; reads all files."""


def open_weights(path: Path) -> WeightSource:
    """Open a checkpoint for its weights.

    Args:
        path: a Hugging Face folder, or a GGUF file.

    Raises:
        ModelFileError: the files are missing, damaged or not supported.
    """
    if path.is_dir():
        folder = SafetensorsModel(path)
        return WeightSource(folder.config, folder, lambda: _digest_of_folder(folder))
    if path.suffix != ".gguf" or not path.is_file():
        raise ModelFileError(f"{shortened(path.name)!r} is neither a folder nor a .gguf file; use a checkpoint")
    model = GgufModel(path, None)
    return WeightSource(model.config, model, lambda: _digest_of(part_paths(path)))


def _with_ends(source: ModelSource, eos: str = "") -> ModelSource:
    """Add the ends that the configuration does not list: the tokenizer's own, and those of the chat template.

    Args:
        source: an open model, which is changed.
        eos: text of the end-of-sequence token in tokenizer_config.json; empty if there is none.
    """
    template = "" if source.chat_template is None else source.chat_template.source
    texts = {text for text in _END_TEXTS if text in template and not (text == "<|end|>" and _CHANNEL in template)}
    control = source.tokenizer.control_tokens
    found = {control[text].token_id for text in (*texts, eos) if text in control}
    ends = tuple(sorted({*source.config.eos_token_ids, *found}))
    source.config = replace(source.config, eos_token_ids=ends)
    source.tokenizer.eos_token_ids = ends
    return source


def _digest_of(files: Sequence[Path]) -> str:
    """Return the digest of a file, or of the names and digests of several files; missing ones are left out."""
    if len(files) == 1:
        return file_sha256(files[0])
    lines = [f"{path.name} {file_sha256(path)}\n" for path in files if path.is_file()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _template(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    ends = tokenizer.eos_token_ids
    bos = "" if tokenizer.bos_token_id is None else tokenizer.token_bytes(tokenizer.bos_token_id).decode("utf-8")
    eos = tokenizer.token_bytes(ends[0]).decode("utf-8") if ends else ""
    return ChatTemplate(source, bos_token=bos, eos_token=eos)


def _token_text(value: object) -> str:
    """Return the text of a token in tokenizer_config.json, where it is a string or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
