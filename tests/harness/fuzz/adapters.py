"""Targets: the files of a LoRA adapter."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.fuzz.files import header_mutate
from harness.fuzz.mutation import json_at_random
from harness.fuzz.target import Run, Target
from harness.kernels.lora_files import write
from kvferry.core.errors import ModelFileError
from kvferry.model import tiny
from kvferry.weights.adapters.adapter_folder import CONFIG_FILE, TENSORS_FILE, read_adapter

_PATTERNS: dict[str, object] = {
    "use_rslora": True,
    "rank_pattern": {"layers.1.mlp.up_proj": 2},
    "alpha_pattern": {"q_proj": 3.5},
    "bias": "none",
    "modules_to_save": None,
    "init_lora_weights": True,
}


def _written(folder: Path) -> Path:
    return write(folder, tiny.config(), rank=2, linears=("q_proj", "up_proj"), fields={"peft_version": "0.21"})


def _seeds(name: str, *changes: dict[str, object]) -> Callable[[], list[bytes]]:
    def made() -> list[bytes]:
        with TemporaryDirectory() as folder:
            whole = (_written(Path(folder)) / name).read_bytes()
        return [whole, *(json.dumps(json.loads(whole) | change).encode() for change in changes)]

    return made


@contextmanager
def _folder(replaced: str) -> Iterator[Run]:
    with TemporaryDirectory() as name:
        folder = _written(Path(name))

        def run(data: bytes) -> None:
            (folder / replaced).write_bytes(data)
            try:
                adapter = read_adapter(folder, tiny.config(), max_rank=64)
            except ModelFileError:
                return
            assert adapter.updates
            assert len(adapter.digest) == 32

        yield run


TARGETS = (
    Target("adapter", _seeds(TENSORS_FILE), partial(_folder, TENSORS_FILE), header_mutate),
    Target("adapter_config", _seeds(CONFIG_FILE, _PATTERNS), partial(_folder, CONFIG_FILE), json_at_random),
)
