"""`kvferry picker`: runs one endpoint picker."""

import asyncio
import gc
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvferry.cli.help_pages import SettingsCommand
from kvferry.cli.options import Values, server_certificate, with_settings
from kvferry.cli.supervised import announce, follow_parent, leave_on_signals
from kvferry.core.errors import UsageError
from kvferry.core.process.open_files import raise_open_files
from kvferry.core.settings import picker as settings

if TYPE_CHECKING:
    from kvferry.picker.config import PickerConfig
    from kvferry.picker.decide.endpoints import PoolEndpoint

_MAX_PRIORITY = 1_000_000
_MAX_BODY_BYTES = 1 << 30


@click.command("picker", cls=SettingsCommand)
@with_settings(settings.PICKER)
def command(values: Values) -> None:
    """Run an endpoint picker: answer a gateway's question which model server serves a request.

    \b
      kvferry picker --endpoints 10.0.0.5:8000 --endpoints 10.0.0.6:8000
      kvferry picker --endpoints 10.0.0.5:8000/8002 --flavor kvferry --plaintext
      kvferry picker --prefill-endpoints 10.0.0.5:8000 --endpoints 10.0.0.6:8000
      kvferry picker --inference-pool chat/llama --metrics 0.0.0.0:9090 --health 0.0.0.0:9003

    Gateways ask over Envoy's external processing protocol, as the InferencePool of the Gateway API names the picker
    in its endpointPickerRef. Model servers are kvferry's gateways, vLLM or SGLang; their metrics are read.
    """
    leave_on_signals()
    raise_open_files()
    follow_parent()
    from kvferry.picker.picker_process import PickerListening, run_picker

    config = _config(values)

    def listening(bound: PickerListening) -> None:
        announce({"event": "listening", "grpc": bound.grpc, "health": bound.health, "metrics": bound.metrics})
        gc.collect()
        gc.freeze()

    asyncio.run(run_picker(config, announce=listening))


def _config(values: Values) -> "PickerConfig":
    """Return the picker's configuration.

    Raises:
        UsageError: settings contradict each other, or a value is not valid.
    """
    from kvferry.gateway.decide.config import PoolName
    from kvferry.picker.config import PickerConfig, ScrapeConfig
    from kvferry.picker.decide.choice import ChoiceConfig
    from kvferry.picker.decide.exchange import BodyMode
    from kvferry.picker.decide.saturation import SaturationConfig

    modes = {"none": BodyMode.NONE, "buffered": BodyMode.BUFFERED, "full-duplex": BodyMode.FULL_DUPLEX}
    endpoints = (
        *_endpoints("endpoints", values["endpoints"], values["metrics_port"]),
        *_endpoints("prefill_endpoints", values["prefill_endpoints"], values["metrics_port"]),
    )
    if values["inference_pool"] and endpoints:
        raise UsageError(
            "--inference-pool cannot be combined with --endpoints: list endpoints or name their pool",
            field="inference_pool",
        )
    if not values["inference_pool"] and not values["endpoints"]:
        raise UsageError("no endpoints; give --endpoints or --inference-pool", field="endpoints")
    if not values["metrics_path"].startswith("/"):
        raise UsageError(f"metrics_path {values['metrics_path']!r} must begin with /", field="metrics_path")
    if values["max_body_bytes"] > _MAX_BODY_BYTES:
        raise UsageError("--max-body-bytes must be at most 1GiB, as messages of gRPC are", field="max_body_bytes")
    return PickerConfig(
        listen=values["listen"],
        health=values["health"],
        metrics=values["metrics"],
        endpoints=endpoints,
        pool=PoolName.parse(values["inference_pool"]) if values["inference_pool"] else None,
        scrape=ScrapeConfig(
            flavor=values["flavor"],
            path=values["metrics_path"],
            port=values["metrics_port"],
            seconds=values["scrape_seconds"],
            stale_seconds=values["stale_seconds"],
        ),
        choice=ChoiceConfig(
            policy=values["policy"],
            prefix_chunks=values["prefix_blocks"],
            skip_prefill_below_tokens=values["skip_prefill_below"],
            fallbacks=values["fallbacks"],
        ),
        saturation=SaturationConfig(
            max_waiting=values["saturation_waiting"],
            max_usage=values["saturation_usage"],
            queue_seconds=values["queue_seconds"],
            max_queued=values["max_queued"],
            objectives=_objectives(values["objective"]),
        ),
        body_mode=modes.get(values["body_mode"]),
        max_body_bytes=values["max_body_bytes"],
        prefill_header=values["prefill_header"].lower(),
        tls=_tls(values),
        is_plaintext=values["plaintext"],
        shares_port=values["share_ports"],
        drain_seconds=values["drain_seconds"],
    )


def _endpoints(name: str, given: Iterable[str], metrics_port: int) -> Iterable["PoolEndpoint"]:
    """Yield the endpoints of a setting.

    Raises:
        UsageError: one is not an IP address with a port, or is given twice.
    """
    from kvferry.gateway.decide.config import Endpoint
    from kvferry.picker.decide.endpoints import PoolEndpoint
    from kvferry.picker.decide.headers import address_of

    seen: set[str] = set()
    for text in given:
        parsed = Endpoint.parse(text)
        host, _, port = parsed.address.rpartition(":")
        try:
            address = address_of(host, int(port))
        except ValueError as error:
            raise UsageError(
                f"{name}: {text!r} has no IP address; gateways accept only IP addresses with a port", field=name
            ) from error
        if address in seen:
            raise UsageError(f"{name}: {address} is given twice", field=name)
        seen.add(address)
        other = parsed.admin_address.rpartition(":")[2]
        if not all(0 < int(each) <= 0xFFFF for each in (port, other)):
            raise UsageError(f"{name}: {text!r} has a port that is not from 1 to 65535", field=name)
        scraped = other if other != port else str(metrics_port or port)
        yield PoolEndpoint(
            address, address, f"{address.rpartition(':')[0]}:{scraped}", is_prefill=name == "prefill_endpoints"
        )


def _objectives(given: Iterable[str]) -> dict[str, int]:
    """Return the priorities by objective.

    Raises:
        UsageError: one is not NAME=PRIORITY.
    """
    found: dict[str, int] = {}
    for text in given:
        name, _, number = text.partition("=")
        digits = number.removeprefix("-")
        if not name or not digits.isdecimal() or len(digits) > 7 or int(digits) > _MAX_PRIORITY:
            raise UsageError(
                f"objective {text!r} is not NAME=PRIORITY with a whole number from -{_MAX_PRIORITY} to {_MAX_PRIORITY}",
                field="objective",
            )
        found[name] = int(number)
    return found


def _tls(values: Values) -> tuple[Path, Path] | None:
    certificate = server_certificate(values)
    if certificate is not None and values["plaintext"]:
        raise UsageError("--plaintext serves without TLS; leave out --tls-cert-file", field="plaintext")
    return certificate
