"""A fixture with the embedded model, which is opened once per session."""

import pytest

from kvferry.model.source import ModelSource, open_model


@pytest.fixture(scope="session")
def smollm() -> ModelSource:
    return open_model("smollm2-135m-instruct")
