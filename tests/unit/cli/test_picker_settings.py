"""Settings of `kvferry picker`: what they become, and what is refused."""

from typing import Any

import pytest
from click.testing import CliRunner

from kvferry.cli.commands.picker import _config, command
from kvferry.cli.options import Values
from kvferry.core.errors import UsageError
from kvferry.core.settings.picker import PICKER
from kvferry.core.settings.resolve import resolve
from kvferry.picker.config import PickerConfig
from kvferry.picker.decide.exchange import BodyMode


def config(**flags: Any) -> PickerConfig:
    given = {"endpoints": ("10.0.0.1:8000",), **flags}
    return _config(Values(resolve(PICKER, given, {}, {}, "")))


def test_the_defaults() -> None:
    found = config()
    assert [one.address for one in found.endpoints] == ["10.0.0.1:8000"]
    assert (found.listen, found.is_plaintext, found.body_mode, found.tls) == ("0.0.0.0:9002", False, None, None)
    assert (found.choice.policy, found.choice.fallbacks, found.scrape.flavor) == ("latency", 0, "auto")


def test_endpoints_and_the_ports_of_their_metrics() -> None:
    found = config(
        endpoints=("10.0.0.1:8000/9100", "[fd00::1]:8000"), prefill_endpoints=("10.0.0.2:8000",), metrics_port="9000"
    )
    assert [(one.address, one.metrics_address, one.is_prefill) for one in found.endpoints] == [
        ("10.0.0.1:8000", "10.0.0.1:9100", False),
        ("[fd00::1]:8000", "[fd00::1]:9000", False),
        ("10.0.0.2:8000", "10.0.0.2:9000", True),
    ]


def test_a_pool_modes_and_objectives() -> None:
    found = config(
        endpoints=(),
        inference_pool="chat/llama",
        body_mode="buffered",
        objective=("batch=-1", "high=100"),
        fallbacks="2",
    )
    assert str(found.pool) == "chat/llama"
    assert found.body_mode is BodyMode.BUFFERED
    assert found.saturation.objectives == {"batch": -1, "high": 100}
    assert found.choice.fallbacks == 2


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"endpoints": ()}, "no endpoints; give --endpoints or --inference-pool"),
        ({"inference_pool": "chat/llama"}, "cannot be combined"),
        ({"endpoints": (), "inference_pool": "llama"}, "use NAMESPACE/NAME"),
        ({"endpoints": ("host:8000",)}, "no IP address"),
        ({"endpoints": ("10.0.0.1",)}, "not a worker's address"),
        ({"endpoints": ("10.0.0.1:8000", "10.0.0.1:8000/9")}, "given twice"),
        ({"objective": ("batch",)}, "not NAME=PRIORITY"),
        ({"objective": ("batch=1.5",)}, "not NAME=PRIORITY"),
        ({"objective": ("batch=99999999999",)}, "not NAME=PRIORITY"),
        ({"objective": ("=1",)}, "not NAME=PRIORITY"),
        ({"metrics_path": "metrics"}, "must begin with /"),
        ({"tls_cert_file": "x"}, "tls_key_file is not set"),
        ({"tls_cert_file": "x", "tls_key_file": "y", "plaintext": "true"}, "--plaintext"),
    ],
)
def test_what_is_refused_names_the_remedy(flags: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        config(**flags)


def test_help_teaches() -> None:
    shown = CliRunner().invoke(command, ["--help"]).output
    for part in ("kvferry picker --endpoints 10.0.0.5:8000", "--inference-pool", "endpointPickerRef", "--flavor"):
        assert part in shown
