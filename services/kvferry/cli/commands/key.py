"""`kvferry key`: makes the keys with which the processes of a pool authenticate each other."""

import secrets
import sys

import click

from kvferry.cli import settings
from kvferry.cli.options import Values, read_key, reported, with_settings
from kvferry.core.errors import UsageError
from kvferry.gateway.flow.tenant_table import KEY_PREFIX
from kvferry.gateway.http.api_keys import key_digest
from kvferry.rpc.access.call_keys import role_key
from kvferry.rpc.access.table import CallerRole

_MIN_KEY_CHARS = 16
"""Minimum number of characters of a client's key; shorter keys could be found from their hashes."""
_MAX_KEY_CHARS = 512


@click.group("key")
def command() -> None:
    """Make the keys of a pool.

    \b
      kvferry key new > ticket.key                                      all workers of the pool
      kvferry key gateway --ticket-key-file ticket.key > gateway.key    its gateways
      kvferry key operator --ticket-key-file ticket.key                 programs that drain workers
      kvferry key new | tee client.key | kvferry key hash               a client, for the tenants file

    Keep the files readable for their owner only. A gateway needs only its own key: it cannot make tickets, claim pages
    or drain workers.
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
                f"an API key is one word of {_MIN_KEY_CHARS} to {_MAX_KEY_CHARS} characters on standard input; make "
                "one with `kvferry key new`",
                field="key",
            )
    click.echo(KEY_PREFIX + key_digest(key).hex())


@command.command("gateway")
@with_settings(settings.TICKET_KEY)
def gateway(values: Values) -> None:
    """Print the gateway key of a ticket key."""
    click.echo(_derived(values, CallerRole.GATEWAY))


@command.command("operator")
@with_settings(settings.TICKET_KEY)
def operator(values: Values) -> None:
    """Print the key of programs that read the status of workers and drain them."""
    click.echo(_derived(values, CallerRole.OPERATOR))


def _derived(values: Values, role: CallerRole) -> str:
    lines = read_key(values, "ticket_key")
    if not lines:
        raise UsageError(
            "no ticket key; write one with `kvferry key new > ticket.key` and set --ticket-key-file ticket.key",
            field="ticket_key_file",
        )
    return role_key(lines[0], role).hex()
