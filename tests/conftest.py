"""Settings for all tests, some of which must be set before the first import."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Triton reads this at its import to choose between compiler and interpreter; `make test-gpu` sets 0.
os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ["TRITON_INTERPRET"] != "0":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # hides GPUs, which `--device auto` would use with interpreted kernels

# Otherwise waiting torch threads spin and take the cores from the processes that they wait for.
os.environ.setdefault("GOMP_SPINCOUNT", "100")

# Without a deadline, no property test depends on the speed of the machine.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")


_ALONE = (Path(__file__).parent / "faults", Path(__file__).parent / "fuzz")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in _ALONE):
            item.add_marker(pytest.mark.alone)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seconds", type=float, default=10.0, help="seconds per fuzz target (tests/fuzz)")
