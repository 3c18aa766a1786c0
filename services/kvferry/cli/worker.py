"""`kvferry worker`: one worker process."""

import asyncio
import secrets
from pathlib import Path

import click

from kvferry.cli import settings
from kvferry.cli.options import Values, with_settings
from kvferry.cli.supervised import announce, follow_parent, leave_on_signals
from kvferry.core import config as surroundings
from kvferry.core.errors import UsageError


def read_key(values: Values, name: str) -> list[bytes]:
    """The keys of a setting `<name>` (environment) or `<name>_file`; newest first.

    Raises:
        UsageError: a key is too short to be one.
    """
    if values[f"{name}_file"]:
        lines = surroundings.read_secret_file(Path(values[f"{name}_file"]), f"{name}_file").splitlines()
    else:
        lines = [values[name].encode()] if values[name] else []
    for line in lines:
        if len(line) < 16:
            raise UsageError(f"{name}: a key has at least 16 bytes, this one has {len(line)}", field=name)
    return lines


@click.command("worker")
@with_settings(settings.WORKER)
def command(values: Values) -> None:
    """One worker process; prints its addresses as JSON when it listens and again when it is ready.

    \b
      kvferry worker --role both --listen 127.0.0.1:9100
      KVFERRY_TICKET_KEY=... kvferry worker --role prefill --connector nixl --listen 10.0.0.5:9100
    """
    leave_on_signals()
    follow_parent()
    # Imported here: these load gRPC and the kernels, which `--help` and wrong flags need not wait for.
    from kvferry.engine.room import SchedulerLimits
    from kvferry.kv.offers import OfferTimes
    from kvferry.kv.price import LoadPolicy
    from kvferry.workers.config import EngineConfig, WorkerConfig
    from kvferry.workers.main import run_worker
    from kvferry.workers.unit import UnitPlace

    role = values["role"]
    tickets = read_key(values, "ticket_key")
    if not tickets and role == "both":
        tickets = [secrets.token_bytes(32)]  # alone it hands nothing over
    tenants = read_key(values, "tenant_key") or [secrets.token_bytes(32)]
    worker = WorkerConfig(
        role=role,
        engine=EngineConfig(
            model=values["model"],
            served_name=values["served_name"],
            device=values["device"],
            dtype=values["dtype"],
            weights=values["weights"],
            numerics=values["numerics"],
            kernels=values["kernels"],
            threads=values["threads"],
            kv_bytes=values["kv_memory"],
            block_tokens=values["block_tokens"],
            max_model_tokens=values["max_model_tokens"],
            load_policy=LoadPolicy(values["load_policy"]),
            limits=SchedulerLimits(
                token_budget=values["token_budget"],
                max_chunk_tokens=values["max_chunk_tokens"],
                max_mixed_tokens=values["max_mixed_tokens"],
                max_sequences=values["max_sequences"],
            ),
        ),
        advertise_host=values["advertise_host"],
        connector=values["connector"],
        worker_id=values["worker_id"],
        metrics=values["metrics"],
        ticket_secrets=tuple(tickets),
        tenant_secret=tenants[0],
        offers=OfferTimes(offer_seconds=values["offer_seconds"], lease_seconds=values["lease_seconds"]),
        tiers=tuple(values["tier"]),
        tier_object_tokens=values["tier_object_tokens"],
        drain_seconds=values["drain_seconds"],
    )
    places = [UnitPlace("prefill" if role == "split" else role, values["listen"], values["admin"])]
    if role == "split":
        places.append(UnitPlace("decode", values["decode_listen"], values["decode_admin"]))
    raise SystemExit(asyncio.run(run_worker(worker, places, announce)))
