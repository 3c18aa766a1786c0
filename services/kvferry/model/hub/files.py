"""Chooses the files of a repository that are needed to serve its model. Pure.

A safetensors model has its files at the top of the repository: those that `model.source` reads, and the weights that
the index names. A GGUF model is one file, or several numbered parts, at any place. Everything else, such as pickles and
Python files, is never fetched.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.core.errors import ModelFileError, UnknownModel, shortened
from kvferry.model.hub.names import HubName
from kvferry.weights.checkpoints.pickled import CONVERT, is_pickled
from kvferry.weights.files.regular_file import MAX_JSON_BYTES

MAX_LISTED = 20_000
"""Maximum number of files of a repository."""
_MAX_BYTES = 1 << 44
"""Maximum size of a model in bytes, 16 TiB."""
_MAX_PARTS = 1024
_MAX_SHOWN = 24
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
SMALL = (
    CONFIG,
    "generation_config.json",
    _TOKENIZER,
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that a safetensors model may have beside its weights and their index."""
_FAST = "`AutoTokenizer.from_pretrained(SOURCE).save_pretrained(FOLDER)`"
"""Command that writes a tokenizer.json."""
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+ -]{0,199}(?:/[A-Za-z0-9_][A-Za-z0-9_.+ -]{0,199}){0,3}")
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})")
_LABEL = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]{1,3})*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|F32))$", re.IGNORECASE
)
_NOT_MODELS = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""GGUF files of other contents: image projectors, statistics of a quantization."""


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a repository, as the hub lists it."""

    path: str
    size: int
    """Bytes."""
    digest: str = ""
    """SHA-256 of the content (64 hex digits) for files in large-file storage, otherwise its name in git (40); empty if
    it is not known."""


def checked_files(name: HubName, files: Sequence[RepoFile]) -> dict[str, RepoFile]:
    """Return the files by path, without those whose path is none in a repository, such as `../x`.

    Raises:
        ModelFileError: there are too many.
    """
    if len(files) > MAX_LISTED:
        raise ModelFileError(
            f"model {name.served!r} has {len(files)} files, of which at most {MAX_LISTED} are read; use another "
            "repository, or download the files needed into a folder",
            field="model",
        )
    return {file.path: file for file in files if _SAFE.fullmatch(file.path) is not None and ".." not in file.path}


def is_gguf(name: HubName, files: Mapping[str, RepoFile]) -> bool:
    """Return whether a model is a GGUF file: if a quantization is given, or if there are no other weights."""
    return bool(name.quantization) or (CONFIG not in files and any(path.endswith(".gguf") for path in files))


def small_files(name: HubName, files: Mapping[str, RepoFile]) -> list[RepoFile]:
    """Return the files of a safetensors model beside its weights, and the index of the weights.

    Raises:
        ModelFileError: the repository has no safetensors, or no tokenizer that can be read.
    """
    if SINGLE not in files and INDEX not in files:
        raise ModelFileError(f"model {name.served!r} {_other_weights(name, files)}", field="model")
    for needed in (CONFIG, _TOKENIZER):
        if needed not in files:
            raise ModelFileError(
                f"model {name.served!r} has no {needed}, which is needed; use a repository with it"
                + (f", or write it with transformers: {_FAST}" if needed == _TOKENIZER else ""),
                field="model",
            )
    found = [files[path] for path in (*SMALL, INDEX) if path in files]
    for file in found:
        if file.size > MAX_JSON_BYTES:
            raise ModelFileError(
                f"model {name.served!r}: {file.path} has {file.size} bytes, at most {MAX_JSON_BYTES} are read; use "
                "another repository",
                field="model",
            )
    return _bounded(name, found)


def weight_files(name: HubName, files: Mapping[str, RepoFile], index: bytes | None) -> list[RepoFile]:
    """Return the weights of a safetensors model.

    Args:
        name: name of the model.
        files: files of the repository by path.
        index: content of the index; `None` if there is none.

    Raises:
        ModelFileError: the index is damaged, or names a file that the repository does not have.
    """
    if index is None:
        return _bounded(name, [files[SINGLE]])
    try:
        table = json.loads(index)["weight_map"]
        paths = sorted({str(path) for path in table.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFileError(
            f"model {name.served!r}: {INDEX} has no weight_map that can be read; use another revision", field="model"
        ) from error
    for path in paths:
        if "/" in path or not path.endswith(".safetensors") or path not in files:
            raise ModelFileError(
                f"model {name.served!r}: {INDEX} lists {shortened(path)!r}, which is not a safetensors file at the top "
                "of the repository; use another revision",
                field="model",
            )
    return _bounded(name, [files[path] for path in paths])


def gguf_files(name: HubName, files: Mapping[str, RepoFile]) -> list[RepoFile]:
    """Return the GGUF file with the quantization of the name, or all of its parts, the first one first.

    Without a quantization in the name, there must be only one model.

    Raises:
        UnknownModel: no model has this quantization, or several have it; the message lists what there is.
        ModelFileError: a part is missing.
    """
    models = _gguf_models(files)
    if not models:
        raise ModelFileError(
            f"model {name.served!r}: the repository has no GGUF files; use {name.repo} without a quantization",
            field="model",
        )
    wanted = name.quantization.lower()
    labels = {stem: _label(stem) for stem in models}
    found = [stem for stem, label in labels.items() if not wanted or label.lower() == wanted]
    found = found or [stem for stem, label in labels.items() if label.lower().endswith(f"-{wanted}")]
    if len(found) != 1:
        shown = found or list(models)
        kinds = [labels[stem] for stem in shown]
        is_clear = all(kinds) and len(set(kinds)) == len(kinds)
        choices = kinds if is_clear else [f"{stem}.gguf" for stem in shown]
        state = "has several GGUF models" if found else f"has no quantization {name.quantization!r}"
        remedy = f"choose one: {name.repo}:{choices[0]}" if is_clear else "download one, and give its path"
        raise UnknownModel(f"model {name.served!r} {state} ({_listed(choices)}); {remedy}", field="model")
    model = models[found[0]]
    if set(model.parts) != set(range(1, model.count + 1)):
        raise ModelFileError(
            f"model {name.served!r}: {found[0]} has {len(model.parts)} of its {model.count} parts; use another "
            "revision",
            field="model",
        )
    return _bounded(name, [model.parts[number] for number in range(1, model.count + 1)])


@dataclass(slots=True)
class _Gguf:
    """A GGUF model: its files by number, and how many there should be."""

    count: int
    parts: dict[int, RepoFile]


def _gguf_models(files: Mapping[str, RepoFile]) -> dict[str, _Gguf]:
    """Return the GGUF models by path, without number and suffix."""
    found: dict[str, _Gguf] = {}
    for path, file in sorted(files.items()):
        stem = path.removesuffix(".gguf")
        if stem == path or _NOT_MODELS.search(path.rpartition("/")[2]):
            continue
        match = _NUMBERED.fullmatch(stem)
        if match is None or not 1 <= int(match[3]) <= _MAX_PARTS:
            found[stem] = _Gguf(1, {1: file})
        else:
            model = found.setdefault(match[1], _Gguf(int(match[3]), {}))
            model.parts[int(match[2])] = file
    return found


def _label(stem: str) -> str:
    """Return the quantization in a path, upper case; empty if it has none. It may be the name of the folder."""
    folder, _, file = stem.rpartition("/")
    match = _LABEL.search(file) or _LABEL.search(folder.rpartition("/")[2])
    return "" if match is None else match[1].upper()


def _other_weights(name: HubName, files: Mapping[str, RepoFile]) -> str:
    """Return what a repository without safetensors has instead, and what to do."""
    if any(path.endswith(".gguf") for path in files):
        labels = sorted({_label(stem) for stem in _gguf_models(files)} - {""})
        example = labels[0] if labels else "Q4_K_M"
        return f"has GGUF files ({_listed(labels)}); choose one by its quantization: {name.repo}:{example}"
    pickles = sorted(path for path in files if is_pickled(path))
    if pickles:
        return f"has only weights that can run code when they are read ({_listed(pickles)}); {CONVERT}"
    return f"has no weights at the top of the repository: neither {SINGLE} nor {INDEX}; use another repository"


def _listed(names: Iterable[str]) -> str:
    """Return a bounded list for a message."""
    shown = [shortened(name) for name in names]
    more = f", and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
    return ", ".join(shown[:_MAX_SHOWN]) + more


def _bounded(name: HubName, files: list[RepoFile]) -> list[RepoFile]:
    """Check the sizes, which are the hub's word."""
    if any(file.size < 0 for file in files) or sum(file.size for file in files) > _MAX_BYTES:
        raise ModelFileError(
            f"model {name.served!r}: the hub gives no size, or one that no model has; use another revision",
            field="model",
        )
    return files
