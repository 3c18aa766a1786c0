"""`kvferry worker`: runs one worker process."""

import asyncio
import secrets

import click

from kvferry.cli.engine_settings import engine_settings
from kvferry.cli.help_pages import SettingsCommand
from kvferry.cli.options import Values, pool_tls_files, read_key, traces_of, with_settings
from kvferry.cli.supervised import announce, follow_parent, leave_on_signals
from kvferry.core.process.open_files import raise_open_files
from kvferry.core.settings import processes as settings


@click.command("worker", cls=SettingsCommand)
@with_settings(settings.WORKER)
def command(values: Values) -> None:
    """Run one worker process; prints its addresses as JSON when it listens and when it is ready.

    \b
      kvferry key new > ticket.key
      kvferry worker --role both --listen 127.0.0.1:9100 --ticket-key-file ticket.key
      kvferry worker --role prefill --connector nixl --listen 10.0.0.5:9100 --ticket-key-file ticket.key
      kvferry worker --role decode --listen 10.0.0.6:9100 --ticket-key-file ticket.key \\
          --pool-tls-cert-file worker.crt --pool-tls-key-file worker.key --pool-tls-ca-file ca.crt
    """
    leave_on_signals()
    raise_open_files()
    follow_parent()
    # Imported here, since these modules load gRPC and the kernels, which would delay `--help` and errors in flags.
    from kvferry.kv.handoff.offers import OfferTimes
    from kvferry.text.requests.answer_rules import AnswerParsers
    from kvferry.workers.build import UnitEndpoint
    from kvferry.workers.config import WorkerConfig
    from kvferry.workers.main import run_worker

    role = values["role"]
    tickets = read_key(values, "ticket_key")
    tenants = read_key(values, "tenant_key") or [secrets.token_bytes(32)]
    worker = WorkerConfig(
        role=role,
        engine=engine_settings(values),
        advertise_host=values["advertise_host"],
        connector=values["connector"],
        worker_id=values["worker_id"],
        metrics=values["metrics"],
        health=values["health"],
        pool_tls=pool_tls_files(values),
        ticket_secrets=tuple(tickets),
        tenant_key=tenants[0],
        offers=OfferTimes(offer_seconds=values["offer_seconds"], lease_seconds=values["lease_seconds"]),
        tiers=tuple(values["tier"]),
        tier_object_tokens=values["tier_object_tokens"],
        verify_kv=values["verify_kv"],
        kv_encryption=values["kv_encryption"],
        adapter_folder=values["adapter_folder"],
        weights_folder=values["weights_folder"],
        weight_version=values["weight_version"],
        adapters_file=values["adapters_file"],
        drain_seconds=values["drain_seconds"],
        traces=traces_of(values),
        parsers=AnswerParsers(values["tool_call_parser"], values["reasoning_parser"]),
    )
    places = [UnitEndpoint("prefill" if role == "split" else role, values["listen"], values["admin"])]
    if role == "split":
        places.append(UnitEndpoint("decode", values["decode_listen"], values["decode_admin"]))
    raise SystemExit(asyncio.run(run_worker(worker, places, announce)))
