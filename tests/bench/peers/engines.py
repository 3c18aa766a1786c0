"""The compared engines and their settings for two cores; the adapters state the reasons."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from peers.environments import PEERS, python_of
from peers.protocol import Child

from kvferry.core.clock import Clock
from kvferry.core.process.config import child_environment

FOLDER = Path(__file__).parent
THREADS = 2


class Forms(Protocol):
    """A model in the forms that the engines read."""

    def path(self, form: str) -> Path:
        """Return the file or folder of a form."""
        ...


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine with weights of one class."""

    name: str
    peer: str
    """Name for `--peers`."""
    weight_class: str
    """`16-bit` or `4-bit`."""
    adapter: str
    form: str
    """Form of the model: a name in `models`."""
    settings: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    takes_arrivals: bool = True
    """Whether the adapter can accept a request while others run."""


_VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": str(THREADS),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}

ENGINES = (
    Engine("kvferry-bf16", "kvferry", "16-bit", "kvferry_engine", "shipped", {"weights": "bfloat16"}),
    Engine("vllm-bf16", "vllm", "16-bit", "vllm_engine", "folder", environment=_VLLM),
    Engine("openvino-f16", "openvino", "16-bit", "openvino_engine", "f16", {"step_tokens": 4096}),
    Engine("llamacpp-f16", "llamacpp", "16-bit", "llamacpp_engine", "f16", takes_arrivals=False),
    Engine("kvferry-q4", "kvferry", "4-bit", "kvferry_engine", "shipped", {"weights": "shipped"}),
    Engine("kvferry-q4-fast", "kvferry", "4-bit", "kvferry_engine", "shipped", {"numerics": "fast"}),
    Engine("openvino-q4", "openvino", "4-bit", "openvino_engine", "shipped", {"step_tokens": 4096}),
    Engine("llamacpp-q4", "llamacpp", "4-bit", "llamacpp_engine", "shipped", takes_arrivals=False),
)


def start(
    engine: Engine,
    work: Path,
    models: Forms,
    *,
    install_seconds: float,
    start_seconds: float,
    clock: Clock,
    say: Callable[[str], None],
) -> Child:
    """Install the packages of an engine and start it.

    Raises:
        EngineFailed: the installation fails, or the engine does not become ready.
    """
    peer = PEERS.get(engine.peer)
    python = Path(sys.executable) if peer is None else python_of(peer, work, seconds=install_seconds, say=say)
    say(f"{engine.name}: model")
    model = models.path(engine.form)
    say(f"{engine.name}: starting; at most {start_seconds:.0f} s")
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    settings = {"model": str(model), "threads": THREADS, **engine.settings}
    return Child(
        engine_command(python, engine.adapter, settings),
        child_environment(dict(engine.environment)),
        logs / f"{engine.name}.log",
        seconds=start_seconds,
        clock=clock,
    )


def engine_command(python: Path, adapter: str, settings: Mapping[str, object]) -> list[str]:
    """Return the command line that starts the adapter's process, whose output is not buffered."""
    return [
        str(python),
        "-u",
        str(FOLDER / "child.py"),
        str(FOLDER / "adapters" / f"{adapter}.py"),
        json.dumps(settings),
    ]
