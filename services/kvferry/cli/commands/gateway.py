"""`kvferry gateway`: runs one gateway process."""

import asyncio
import functools
import gc
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvferry.cli.fetching import fetch_first
from kvferry.cli.help_pages import SettingsCommand
from kvferry.cli.options import Values, pool_tls_files, read_key, server_certificate, traces_of, with_settings
from kvferry.cli.supervised import announce, follow_parent, leave_on_signals
from kvferry.core.errors import UsageError
from kvferry.core.process.config import forget_variables
from kvferry.core.process.memory import return_freed_memory
from kvferry.core.process.open_files import raise_open_files
from kvferry.core.settings import processes as settings
from kvferry.core.settings.class_weights import weights_in_use
from kvferry.model.hub.names import SCHEME, parse_hub_name

if TYPE_CHECKING:
    from kvferry.gateway.decide.config import BatchConfig, GatewayConfig

_NOT_IN_NAMES = re.compile(r"[^\w-]")
"""Characters of a model's name that the name of its folder does not have."""
_ROLES = ("prefill", "decode", "both")


@click.command("gateway", cls=SettingsCommand)
@with_settings(settings.GATEWAY, listens="http")
def command(values: Values) -> None:
    """Run one gateway process: OpenAI-compatible HTTP and gRPC in front of workers.

    \b
      kvferry key gateway --ticket-key-file ticket.key > gateway.key
      kvferry gateway --both 127.0.0.1:9100/9101 --gateway-key-file gateway.key
      kvferry gateway --prefill 10.0.0.5:9100/9101 --decode 10.0.0.6:9100/9101 --gateway-key-file gateway.key
      kvferry gateway --processes 4 --both 127.0.0.1:9100/9101 --gateway-key-file gateway.key
      kvferry gateway --pool chat/smollm --http 0.0.0.0:8000 --linger-seconds 5 --gateway-key-file gateway.key

    With --pool the gateway watches the pool's EndpointSlices. While the pool has no workers, requests are held, and
    roles that were scaled to zero are scaled from 0 replicas to 1.
    """
    leave_on_signals()
    raise_open_files()
    return_freed_memory()
    follow_parent()
    fetch_first(values)
    if values["processes"] > 1:
        _run_group(values)
        return
    from kvferry.gateway.fleet.worker_keys import WorkerKeys
    from kvferry.gateway.gateway import Listening
    from kvferry.gateway.serve import run_gateway
    from kvferry.serving.constraint_check import ConstraintCheck
    from kvferry.serving.model_text import open_text_model
    from kvferry.serving.text_process import TextProcess
    from kvferry.text.requests.answer_rules import AnswerParsers

    config = _config(values)
    has_workers = config.fleet.pool is not None or any(values[role] for role in _ROLES)

    def listening(bound: Listening) -> None:
        announce({"event": "listening", "http": bound.http, "grpc": bound.grpc, "admin": bound.admin})
        # Loaded objects are never freed; without this, each garbage collection would traverse all of them.
        gc.collect()
        gc.freeze()

    keys = WorkerKeys(functools.partial(read_key, values, "gateway_key")) if has_workers else None
    # The processes that read prompts and constraints, which may be hostile, inherit the environment.
    may_be_secret = (setting for setting in settings.GATEWAY if setting.is_secret or setting.name == "state")
    forget_variables(setting.variable for setting in may_be_secret)
    parsers = AnswerParsers(values["tool_call_parser"], values["reasoning_parser"])
    open_model = functools.partial(open_text_model, values["model"], values["served_name"], parsers)
    asyncio.run(
        run_gateway(
            config,
            open_model(),
            keys=keys,
            text_process=TextProcess(open_model),
            constraints=ConstraintCheck(open_model),
            announce=listening,
        )
    )


def _config(values: Values) -> "GatewayConfig":
    """Return the gateway's configuration.

    Raises:
        UsageError: settings contradict each other, or a value is not valid.
    """
    from kvferry.gateway.decide.config import (
        CacheMapConfig,
        Endpoint,
        FleetConfig,
        GatewayConfig,
        HoldConfig,
        HttpConfig,
        PoolName,
        RetryConfig,
        RoutingConfig,
        StateConfig,
        StoreLimits,
    )

    def endpoints(role: str) -> tuple[Endpoint, ...]:
        return tuple(Endpoint.parse(text) for text in values[role])

    listed = [f"--{role}" for role in _ROLES if values[role]]
    if values["pool"] and listed:
        raise UsageError(
            f"--pool cannot be combined with {', '.join(listed)}: list workers or name their pool",
            field="pool",
        )
    return GatewayConfig(
        fleet=FleetConfig(
            pool=PoolName.parse(values["pool"]) if values["pool"] else None,
            prefill=endpoints("prefill"),
            decode=endpoints("decode"),
            both=endpoints("both"),
        ),
        hold=HoldConfig(max_held=values["max_held"], seconds=values["hold_seconds"]),
        linger_seconds=values["linger_seconds"],
        http=HttpConfig(
            address=values["http"],
            strict_fields=values["strict_fields"],
            sse_keepalive_seconds=values["sse_keepalive"],
            http_keepalive_seconds=values["http_keepalive"],
            cors_origins=tuple(values["cors_origins"]),
            allowed_hosts=tuple(values["allowed_hosts"]),
            has_page=not values["no_page"],
            api_keys_file=Path(values["api_keys_file"]) if values["api_keys_file"] else None,
            # The next request of a conversation may arrive at another process.
            kept_responses=None if values["share_ports"] else StoreLimits(),
        ),
        grpc_address=values["grpc"],
        admin_address=values["admin"],
        admin_token_file=Path(values["admin_token_file"]) if values["admin_token_file"] else None,
        tls=_tls(values),
        pool_tls=pool_tls_files(values),
        tenant_key=next(iter(read_key(values, "tenant_key")), b""),
        routing=RoutingConfig(
            policy=values["policy"],
            prefix_blocks=values["prefix_blocks"],
            skip_prefill_below_tokens=values["skip_prefill_below"],
            kv_prefetch_tokens=values["kv_prefetch_tokens"],
        ),
        cache_map=CacheMapConfig(max_blocks=values["cache_map_blocks"]),
        retry=RetryConfig(request_timeout_seconds=values["request_timeout"]),
        max_streams=values["max_streams"],
        max_queued=values["max_queued"],
        max_queued_bytes=values["max_queued_bytes"],
        is_small_first=values["tenant_order"] == "fewest-samples",
        class_weights=weights_in_use(values["scheduling"], values["class_weights"]),
        probe_key=values["probe_key"],
        tenants_file=Path(values["tenants"]) if values["tenants"] else None,
        drain_seconds=values["drain_seconds"],
        traces=traces_of(values),
        request_trace=(Path(values["trace_file"]), values["trace_file_bytes"]) if values["trace_file"] else None,
        batches=_batches(values),
        state=StateConfig(values["state"], values["state_bytes"], values["state_file_bytes"])
        if values["state"]
        else None,
        shares_ports=values["share_ports"],
    )


def _batches(values: Values) -> "BatchConfig | None":
    """Return the settings of files and batches; `None` if they are off."""
    from kvferry.core.process.config import cache_dir
    from kvferry.gateway.decide.config import BatchConfig

    given = values["batch_folder"]
    if given == "off":
        return None
    if given == "state" and not values["state"]:
        raise UsageError(
            "batch_folder is 'state', the Redis server of --state, which is not set; set --state redis://HOST:6379/0, "
            "or --batch-folder to a folder (./state is one)",
            field="batch_folder",
        )
    model = values["model"]
    # The folder stays the same when the model gets another commit.
    hub = parse_hub_name(model) if model.startswith(SCHEME) else None
    served = values["served_name"] or (model if hub is None else hub.served)
    name = _NOT_IN_NAMES.sub("_", served.strip("/").rpartition("/")[2])
    return BatchConfig(
        folder=None if given == "state" else Path(given) if given else cache_dir() / "batches" / name,
        max_file_bytes=values["max_file_bytes"],
        tenant_file_bytes=values["tenant_file_bytes"],
        tenant_files=values["tenant_files"],
        lines=values["batch_lines"],
    )


def _run_group(values: Values) -> None:
    """Run several gateway processes until a signal."""
    from kvferry.core.clock import SystemClock
    from kvferry.stack.gateway_group import run_gateway_group

    on_death = functools.partial(click.echo, err=True)
    asyncio.run(run_gateway_group(values.resolved, clock=SystemClock(), announce=announce, on_death=on_death))


def _tls(values: Values) -> tuple[Path, Path, Path | None] | None:
    certificate = server_certificate(values)
    client_ca = values["tls_client_ca_file"]
    if client_ca and certificate is None:
        raise UsageError(
            "--tls-client-ca-file needs TLS; set --tls-cert-file and --tls-key-file too", field="tls_cert_file"
        )
    return None if certificate is None else (*certificate, Path(client_ca) if client_ca else None)
