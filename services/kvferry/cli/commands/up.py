"""`kvferry up`: runs the whole stack on this machine."""

import asyncio
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import click

from kvferry.cli.fetching import fetch_first
from kvferry.cli.help_pages import SettingsCommand
from kvferry.cli.options import Values, print_json, read_key, with_settings
from kvferry.core.clock import SystemClock
from kvferry.core.errors import UsageError
from kvferry.core.process.cores import usable_cores
from kvferry.core.process.stop_signals import STOP_SIGNALS, stop_signals
from kvferry.core.settings import processes as settings
from kvferry.core.settings.setting import Setting
from kvferry.engine.execute.tensors.device import CPU, check_driver, has_driver
from kvferry.gateway.admission.tenants import Tenants, read_keys
from kvferry.kv.tiers.registry import check_tiers
from kvferry.stack.local_stack import LocalStack, check_all_free, check_free
from kvferry.stack.plan.processes import StackConfig
from kvferry.stack.plan.worker_counts import worker_counts

_ROLES = ("prefill", "decode", "both")


def stack_config(
    values: Values, *, http: str, grpc: str, admin: str, workers: Mapping[str, int] | None = None
) -> StackConfig:
    """Convert a command's settings to the configuration of a local stack; fetch its model if it is one of the hub.

    Args:
        values: settings of the command.
        http, grpc, admin: addresses of the gateway.
        workers: number of workers by role; `None` for a pair.

    Raises:
        UsageError: a setting is not possible on this machine.
        KvferryError: the model cannot be fetched.
    """
    check_driver(values["device"])
    api_key, probe_key = _keys(values)
    has = values.resolved
    return StackConfig(
        model=fetch_first(values),
        connector=values["connector"],
        http=http,
        grpc=grpc,
        admin=admin,
        cores=usable_cores(),
        threads=values["threads"],
        tiers=tuple(values["tier"]),
        worker_flags=flags_for(settings.WORKER, values),
        gateway_flags=flags_for(settings.GATEWAY, values),
        api_key=api_key,
        probe_key=probe_key,
        ticket_key=_text_key(values) if "ticket_key" in has else "",
        pool_tls="pool_tls" in has and values["pool_tls"] == "on",
        **(workers or {}),
    )


def _workers(values: Values) -> tuple[Mapping[str, int], str]:
    """Return the number of workers by role, and the reason if there is no pair; see `worker_counts`."""
    return worker_counts(
        {role: values[role] for role in _ROLES},
        usable_cores(),
        has_gpu=values["device"] != CPU and has_driver(),
        has_handoff=any(values.is_given(name) for name in ("connector", "kv_prefetch_tokens")),
    )


_OF_STACK = frozenset(
    {"model", "connector", "threads", "tier", "http", "grpc", "admin", "prefill", "decode", "both", "ticket_key"}
)
"""Settings of the stack itself, which sets those of its processes that have the same names."""


def flags_for(process: Sequence[Setting], values: Values) -> tuple[str, ...]:
    """Return the flags of a process of the stack: each setting of the stack that is given and that the process has.

    Args:
        process: settings of the process.
        values: settings of the stack.
    """
    flags: list[str] = []
    for setting in (*process, *settings.LOGGING):
        name = setting.name
        if name in values.resolved and name not in _OF_STACK and not setting.is_secret and values.is_given(name):
            for value in values[name] if setting.is_repeated else [values[name]]:
                flags += [setting.flag, str(value)]
    return tuple(flags)


def _keys(values: Values) -> tuple[str | None, str]:
    """Return the API key of the stack's own first request, and the key that its gateway accepts in addition; `None` and
    empty if there are none."""
    has = values.resolved
    api_key: str | None = None
    if "api_keys_file" in has and values["api_keys_file"]:
        api_key = _first_key(Path(values["api_keys_file"]))
    if "tenants" in has and values["tenants"]:
        api_keys_file = Path(values["api_keys_file"]) if values["api_keys_file"] else None
        tenants = Tenants.load(Path(values["tenants"]), api_keys_file, SystemClock())
        if api_key is None and tenants.table.keys:  # the tenants file has only hashes of the keys
            made = secrets.token_hex(32)
            return made, made
    return api_key, ""


def _text_key(values: Values) -> str:
    """Return the newest ticket key, which the processes inherit through their environment; empty if none is set."""
    try:
        return next((key.decode("ascii") for key in read_key(values, "ticket_key")), "")
    except UnicodeDecodeError:
        raise UsageError(
            "the ticket key is not ASCII text; create one with `kvferry key new`", field="ticket_key"
        ) from None


def _first_key(path: Path) -> str:
    keys = read_keys(path)
    if not keys:
        raise UsageError(
            f"{path} has no keys, so no requests could be served; add a line `key tenant`", field="api_keys_file"
        )
    return next(iter(keys))


@click.command("up", cls=SettingsCommand)
@click.option("--json", "as_json", is_flag=True, help="When ready, print the addresses as one JSON object.")
@with_settings(settings.UP, argument="model", listens="http")
def command(values: Values, *, as_json: bool) -> None:
    """Start gateway, prefill and decode workers on this machine and keep them running; Ctrl-C drains.

    \b
      kvferry up
      kvferry up Qwen/Qwen3-0.6B                          a model of the Hugging Face Hub, see kvferry pull
      kvferry up --port 8080                              host and port of the HTTP API
      kvferry up --prefill 2 --decode 2 --connector nixl --http 127.0.0.1:0
      kvferry up --prefill 1 --decode 1                   a pair, also on a few cores
      kvferry up --both 1 --prefill 0 --decode 0          one aggregated worker, no hand-off
      kvferry up --tier "dram://?size=4GiB" --tier redis://127.0.0.1:6379/0
      kvferry up --pool-tls on                            calls between the processes are encrypted
    """
    from kvferry.gateway.http.browsers import is_loopback_address  # imports starlette, which would delay `--help`

    check_tiers(values["tier"])
    check_all_free({"http": values["http"], "grpc": values["grpc"]})
    workers, reason = _workers(values)
    config = stack_config(values, http=values["http"], grpc=values["grpc"], admin=_admin(values), workers=workers)
    if reason:
        click.echo(reason, err=True)
    is_local = is_loopback_address(config.http) and is_loopback_address(config.grpc)
    if not (is_local or values["api_keys_file"] or values["tenants"]):
        click.echo(
            "warning: the gateway listens on an address that is not loopback, without API keys; set --api-keys-file or "
            "--tenants, or listen on 127.0.0.1",
            err=True,
        )
    raise SystemExit(asyncio.run(_up(config, values["drain_seconds"], as_json=as_json)))


def _admin(values: Values) -> str:
    """Return the address of the admin API: a free port if the default one is taken."""
    address = str(values["admin"])
    if not values.is_given("admin"):
        try:
            check_free("admin", address)
        except UsageError:
            host, _, port = address.rpartition(":")
            click.echo(f"port {port} is taken; the admin API uses a free one, see below (--admin sets it)", err=True)
            return f"{host}:0"
    return address


def _described(config: StackConfig) -> str:
    """Return the workers of a stack, as text."""
    counts = {"prefill": config.prefill, "decode": config.decode, "both": config.both}
    return "workers: " + ", ".join(f"{count} {role}" for role, count in counts.items() if count)


async def _up(config: StackConfig, drain_seconds: float, *, as_json: bool) -> int:
    ending = list(STOP_SIGNALS)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # SIGHUP is ignored under `nohup`
        ending.append(signal.SIGHUP)
    stop = asyncio.Event()
    with stop_signals(asyncio.get_running_loop(), stop.set, numbers=ending):
        return await _run(config, drain_seconds, stop, as_json=as_json)


async def _run(config: StackConfig, drain_seconds: float, stop: asyncio.Event, *, as_json: bool) -> int:
    """Run the stack until `stop` is set; return the exit status."""

    def say(text: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"  {text} ...", err=True)

    stack = LocalStack(config, clock=SystemClock(), on_progress=say, on_death=partial(click.echo, err=True))
    try:
        starting = asyncio.create_task(stack.start())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        addresses = starting.result()
        if as_json:
            ready = {"event": "ready", "http": addresses.http, "grpc": addresses.grpc, "admin": addresses.admin}
            print_json({**ready, "workers": stack.worker_admin})
        else:
            click.echo(f"ready  http://{addresses.http}/v1  grpc {addresses.grpc}  admin http://{addresses.admin}")
            click.echo(f"       {config.model}; {_described(config)}; chat: kvferry chat --url http://{addresses.http}")
        sys.stdout.flush()
        await stopping
        if sys.stderr.isatty():
            click.echo("draining; press Ctrl-C again to exit immediately", err=True)
        return 0
    finally:
        await stack.stop(drain_seconds + 5.0)
