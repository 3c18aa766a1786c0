"""The interface of a fuzz target."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus"
MAX_SECONDS = 5.0
"""Time limit of one run of a target; CPU time for parsers, elapsed time for servers."""
MAX_MEMORY_BYTES = 1 << 30
"""Memory that a target may use in addition to the memory in use at its start."""

Run = Callable[[bytes], None]
Mutate = Callable[[bytes, Random], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """A parser or server that reads external input."""

    name: str
    seeds: Callable[[], list[bytes]]
    """Valid inputs, from which mutations begin."""
    opened: Callable[[], AbstractContextManager[Run]]
    """Opens the resources of the runs. A run returns, or raises an error that is a finding."""
    mutate: Mutate
    is_server: bool = False
    """Whether other processes handle the input, so that coverage cannot guide the mutations."""

    def findings(self) -> list[Path]:
        """Return the files of earlier findings."""
        folder = CORPUS / self.name
        return sorted(folder.iterdir()) if folder.is_dir() else []
