"""Targets: the files of heads for speculation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from harness.fuzz.files import header_mutate
from harness.fuzz.mutation import json_at_random
from harness.fuzz.target import Run, Target
from harness.kernels.head_files import write_eagle, write_medusa
from kvferry.core.errors import ModelFileError
from kvferry.model import tiny
from kvferry.weights.heads.eagle_head import read_eagle
from kvferry.weights.heads.medusa_head import read_medusa

CONFIG, EAGLE, MEDUSA = "config.json", "model.safetensors", "medusa_lm_head.safetensors"
_MODEL = tiny.config()
_WRITE: dict[str, Callable[[Path], Path]] = {
    "eagle": lambda folder: write_eagle(folder, _MODEL, is_fused=False, has_bias=True),
    "eagle3": lambda folder: write_eagle(folder, _MODEL, is_fused=True, drafted=90),
    "medusa": lambda folder: write_medusa(folder, _MODEL, blocks=2),
}


def _seeds(file: str, kinds: tuple[str, ...]) -> list[bytes]:
    found: list[bytes] = []
    for kind in kinds:
        with TemporaryDirectory() as name:
            found.append((_WRITE[kind](Path(name)) / file).read_bytes())
    return found


@contextmanager
def _folders(file: str, kinds: tuple[str, ...]) -> Iterator[Run]:
    """Write a folder for each kind of head, in which a run replaces one file."""
    with TemporaryDirectory() as name:
        folders = {kind: _WRITE[kind](Path(name) / kind) for kind in kinds}

        def run(data: bytes) -> None:
            for kind, folder in folders.items():
                (folder / file).write_bytes(data)
                try:
                    if kind == "medusa":
                        assert read_medusa(folder, _MODEL).num_heads
                    else:
                        head = read_eagle(folder, _MODEL)
                        assert head.token_ids is None or int(head.token_ids.max()) < _MODEL.vocab_size
                except ModelFileError:
                    continue

        yield run


def _target(name: str, file: str, kinds: tuple[str, ...], mutate: Callable[[bytes, Random], bytes]) -> Target:
    return Target(name, partial(_seeds, file, kinds), partial(_folders, file, kinds), mutate)


TARGETS = (
    _target("eagle", EAGLE, ("eagle", "eagle3"), header_mutate),
    _target("medusa", MEDUSA, ("medusa",), header_mutate),
    _target("head_config", CONFIG, ("eagle", "eagle3", "medusa"), json_at_random),
)
