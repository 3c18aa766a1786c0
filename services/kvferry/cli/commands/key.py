"""`kvferry key`: creates the keys with which a pool's processes authenticate each other."""

import secrets
import sys
from pathlib import Path

import click

from kvferry.cli.help_pages import SettingsCommand
from kvferry.cli.options import NumberRange, Values, read_key, reported, with_settings
from kvferry.core.clock import SystemClock
from kvferry.core.errors import UsageError
from kvferry.core.settings import processes as settings
from kvferry.gateway.admission.tenants import key_digest
from kvferry.gateway.decide.flow.tenant_table import KEY_PREFIX
from kvferry.rpc.access.call_keys import role_key
from kvferry.rpc.access.table import CallerRole
from kvferry.rpc.tls.authority import MAX_DAYS, NAMES, Authority
from kvferry.rpc.tls.written_files import read_ca, write_ca, write_certificate

_MIN_KEY_CHARS = 16
"""Minimum number of characters of a client's key; shorter keys could be found from their hashes."""
_MAX_KEY_CHARS = 512


@click.group("key")
def command() -> None:
    """Create the keys and certificates of a pool.

    \b
      kvferry key new > ticket.key                                      all workers of the pool
      kvferry key gateway --ticket-key-file ticket.key > gateway.key    its gateways
      kvferry key operator --ticket-key-file ticket.key                 programs that drain workers
      kvferry key new | tee client.key | kvferry key hash               a client, for the tenants file
      kvferry key ca tls                                                TLS: the pool's CA, in folder tls
      kvferry key certificate worker tls                                TLS: workers, signed by that CA
      kvferry key certificate gateway tls                               TLS: gateways

    Keep the files readable for their owner only. A gateway needs only its own key, with which it cannot create tickets,
    claim pages or drain workers.
    """


@command.command("new")
def new() -> None:
    """Print a new random ticket key."""
    click.echo(secrets.token_hex(32))


@command.command("hash")
def hash_key() -> None:
    """Print the hash of a client's API key, for the tenants file; the key is the first line of standard input."""
    line = sys.stdin.readline(_MAX_KEY_CHARS + 2)
    key = line.strip()
    with reported():
        if len(key) < _MIN_KEY_CHARS or len(line) > _MAX_KEY_CHARS + 1 or len(key.split()) != 1:
            raise UsageError(
                f"standard input must contain an API key: one word of {_MIN_KEY_CHARS} to {_MAX_KEY_CHARS} characters; "
                "create one with `kvferry key new`",
                field="key",
            )
    click.echo(KEY_PREFIX + key_digest(key).hex())


@command.command("gateway", cls=SettingsCommand)
@with_settings(settings.TICKET_KEY)
def gateway(values: Values) -> None:
    """Print the gateway key that belongs to a ticket key."""
    click.echo(_derived(values, CallerRole.GATEWAY))


@command.command("operator", cls=SettingsCommand)
@with_settings(settings.TICKET_KEY)
def operator(values: Values) -> None:
    """Print the key of programs that read the status of workers and drain them."""
    click.echo(_derived(values, CallerRole.OPERATOR))


def _derived(values: Values, role: CallerRole) -> str:
    lines = read_key(values, "ticket_key")
    if not lines:
        raise UsageError(
            "no ticket key; create one with `kvferry key new > ticket.key` and set --ticket-key-file ticket.key",
            field="ticket_key_file",
        )
    return role_key(lines[0], role).hex()


_FOLDER = click.argument("folder", type=click.Path(path_type=Path, file_okay=False))


_DAYS = NumberRange(0, MAX_DAYS, min_open=True)
_DAYS_HELP = "Validity in days from now."


@command.command("ca")
@_FOLDER
@click.option("--days", type=_DAYS, default=3650, show_default=True, help=_DAYS_HELP)
def ca(folder: Path, days: float) -> None:
    """Create a CA for the TLS of a pool: FOLDER/ca.crt and FOLDER/ca.key.

    \b
      kvferry key ca tls
      kvferry key certificate worker tls
      kvferry key certificate gateway tls

    Every process needs ca.crt, its own certificate and its own key: --pool-tls-ca-file, --pool-tls-cert-file and
    --pool-tls-key-file. ca.key can sign certificates for new members of the pool, so keep it elsewhere; no process
    reads it.

    To replace the CA while the pool runs, create a new one in another folder, append its ca.crt to the ca.crt of every
    process, replace the processes' certificates by certificates of the new CA, then remove the old CA from every
    ca.crt. Processes read changed files again within a second, and no requests are interrupted.
    """
    with reported():
        write_ca(folder, Authority.draw(SystemClock().wall(), days))
    click.echo(f"wrote {folder / 'ca.crt'} and {folder / 'ca.key'}")


@command.command("certificate")
@click.argument("kind", type=click.Choice(tuple(NAMES)))
@_FOLDER
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the certificate and its key; default: FOLDER.",
)
@click.option("--days", type=_DAYS, default=90, show_default=True, help=_DAYS_HELP)
def certificate(kind: str, folder: Path, into: Path | None, days: float) -> None:
    """Create a certificate signed by the CA in FOLDER: KIND.crt and KIND.key, which replace earlier files.

    \b
      kvferry key certificate worker tls
      kvferry key certificate worker tls --into /etc/kvferry --days 30      renewal, while workers run
      kvferry worker --pool-tls-cert-file tls/worker.crt --pool-tls-key-file tls/worker.key \\
          --pool-tls-ca-file tls/ca.crt --ticket-key-file ticket.key

    All workers may share a certificate: it names the kind of the process (worker.kvferry, gateway.kvferry), not its
    address. Programs that call workers, for example to drain them, use one of kind gateway.
    """
    with reported():
        files = write_certificate(into or folder, kind, read_ca(folder), SystemClock().wall(), days)
    click.echo(f"wrote {files.chain} and {files.key}")
