"""Device of the Triton tests: its interpreter on the CPU or, with `make test-gpu`, a GPU."""

import os

import pytest
import torch

INTERPRETED = os.environ["TRITON_INTERPRET"] != "0"


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each test of the family runs on both, in processes of their own."""
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("Triton compiles in this process; without TRITON_INTERPRET=0 it interprets")
    if request.param == "cuda" and INTERPRETED:
        pytest.skip("Triton interprets in this process; make test-gpu runs this on a GPU")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch detects no GPU")
    return torch.device(request.param)
