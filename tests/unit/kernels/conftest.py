"""Device of the Triton tests: its interpreter on the CPU or, with `make test-gpu`, a GPU."""

import os

import pytest
import torch

INTERPRETED = os.environ["TRITON_INTERPRET"] != "0"


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of a test: CPU and GPU runs are separate processes, and each skips the tests of the other."""
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("this process runs tests on a GPU; with TRITON_INTERPRET=1 tests run on the CPU")
    if request.param == "cuda" and INTERPRETED:
        pytest.skip("this process interprets Triton kernels; `make test-gpu` runs this test on a GPU")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch detects no GPU")
    return torch.device(request.param)
