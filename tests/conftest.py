"""Settings of every test, some of which must be made before anything is imported."""

import os

import pytest
from hypothesis import settings

# Triton decides when it is imported whether it compiles or interprets; `make test-gpu` says 0.
os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ["TRITON_INTERPRET"] != "0":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with a GPU, `--device auto` would have every engine interpreted

# Threads of torch that wait would otherwise keep the cores from the processes that they wait for.
os.environ.setdefault("GOMP_SPINCOUNT", "100")

# No test depends on the speed of the machine.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seconds", type=float, default=15.0, help="seconds per fuzz target (tests/fuzz)")
