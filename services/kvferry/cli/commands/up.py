"""`kvferry up`: runs the whole stack on this machine."""

import asyncio
import secrets
import signal
import sys
from pathlib import Path

import click

from kvferry.cli import settings
from kvferry.cli.options import Values, print_json, read_key, traces_of, with_settings
from kvferry.core.clock import SystemClock
from kvferry.core.errors import UsageError
from kvferry.core.process.cores import usable_cores
from kvferry.core.process.stop_signals import STOP_SIGNALS, stop_signals
from kvferry.engine.execute.tensors.device import check_driver
from kvferry.gateway.admission.api_keys import read_keys
from kvferry.gateway.admission.tenants import Tenants
from kvferry.kv.tiers.registry import check_tiers
from kvferry.stack.local_stack import LocalStack
from kvferry.stack.plan.processes import StackConfig


def stack_config(values: Values, *, http: str, grpc: str, admin: str) -> StackConfig:
    """Convert a command's settings to the configuration of a local stack.

    Raises:
        UsageError: a setting is not possible on this machine.
    """
    check_driver(values["device"])
    worker_flags = ["--log-level", values["log_level"]]
    for setting in (*settings.ENGINE, *settings.TIERS[1:], settings.VERIFY_KV):
        if values.is_given(setting.name) and setting.name != "threads":
            worker_flags += [setting.flag, str(values[setting.name])]
    gateway_flags = ["--log-level", values["log_level"]]
    has = values.resolved
    for setting in settings.ADAPTERS:
        if setting.name in has and values.is_given(setting.name):
            given = values[setting.name] if setting.is_repeated else [values[setting.name]]
            worker_flags += [part for value in given for part in (setting.flag, str(value))]
    for setting in settings.ANSWERS:
        if setting.name in has and values.is_given(setting.name):
            worker_flags += [setting.flag, values[setting.name]]
            gateway_flags += [setting.flag, values[setting.name]]
    if "drain_seconds" in has:
        worker_flags += ["--drain-seconds", str(values["drain_seconds"])]
        gateway_flags += ["--drain-seconds", str(values["drain_seconds"])]
    if "processes" in has and values["processes"] > 1:
        gateway_flags += ["--processes", str(values["processes"])]
    if "otlp" in has and traces_of(values) is not None:
        for setting in settings.TRACES:
            worker_flags += [setting.flag, str(values[setting.name])]
            gateway_flags += [setting.flag, str(values[setting.name])]
    if "trace_file" in has and values["trace_file"]:
        for setting in settings.REQUEST_TRACE:
            gateway_flags += [setting.flag, str(values[setting.name])]
    if "scheduling" in has:
        for setting in (settings.SCHEDULING, settings.CLASS_WEIGHTS):
            gateway_flags += [setting.flag, values[setting.name]]
    if "kv_prefetch_tokens" in has:
        gateway_flags += ["--kv-prefetch-tokens", str(values["kv_prefetch_tokens"])]
    if "policy" in has:
        gateway_flags += ["--policy", values["policy"]]
    api_key: str | None = None
    if "api_keys_file" in has and values["api_keys_file"]:
        gateway_flags += ["--api-keys-file", values["api_keys_file"]]
        api_key = _first_key(Path(values["api_keys_file"]))
    probe_key = ""
    if "tenants" in has and values["tenants"]:
        gateway_flags += ["--tenants", values["tenants"]]
        api_keys_file = Path(values["api_keys_file"]) if values["api_keys_file"] else None
        tenants = Tenants.load(Path(values["tenants"]), api_keys_file, SystemClock())
        if api_key is None and tenants.table.keys:  # the tenants file has only hashes of the keys
            api_key = probe_key = secrets.token_hex(32)
    counts = {name: values[name] for name in ("prefill", "decode", "both") if name in has}
    return StackConfig(
        model=values["model"],
        connector=values["connector"],
        http=http,
        grpc=grpc,
        admin=admin,
        cores=usable_cores(),
        threads=values["threads"],
        tiers=tuple(values["tier"]),
        worker_flags=tuple(worker_flags),
        gateway_flags=tuple(gateway_flags),
        api_key=api_key,
        probe_key=probe_key,
        ticket_key=_text_key(values) if "ticket_key" in has else "",
        pool_tls="pool_tls" in has and values["pool_tls"] == "on",
        **counts,
    )


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


@click.command("up")
@click.option("--json", "as_json", is_flag=True, help="When ready, print the addresses as one JSON object.")
@with_settings(settings.UP)
def command(values: Values, *, as_json: bool) -> None:
    """Start gateway, prefill and decode workers on this machine and keep them running; Ctrl-C drains.

    \b
      kvferry up
      kvferry up --prefill 2 --decode 2 --connector nixl --http 127.0.0.1:0
      kvferry up --both 1 --prefill 0 --decode 0          one aggregated worker, no hand-off
      kvferry up --tier "dram://?size=4GiB" --tier redis://127.0.0.1:6379/0
      kvferry up --pool-tls on                            calls between the processes are encrypted
    """
    check_tiers(values["tier"])
    config = stack_config(values, http=values["http"], grpc=values["grpc"], admin=values["admin"])
    raise SystemExit(asyncio.run(_up(config, values["drain_seconds"], as_json=as_json)))


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

    def report_death(name: str, status: int, pause: float) -> None:
        click.echo(f"{name} exited with status {status}; restarting in {pause:.1f} s", err=True)

    stack = LocalStack(config, clock=SystemClock(), on_progress=say, on_death=report_death)
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
        sys.stdout.flush()
        await stopping
        if sys.stderr.isatty():
            click.echo("draining; press Ctrl-C again to exit immediately", err=True)
        return 0
    finally:
        await stack.stop(drain_seconds + 5.0)
