"""`kvferry key`: makes the keys with which the processes of a pool authenticate each other."""

import secrets

import click

from kvferry.cli import settings
from kvferry.cli.options import Values, read_key, with_settings
from kvferry.core.errors import UsageError
from kvferry.rpc.access.call_keys import role_key
from kvferry.rpc.access.table import CallerRole


@click.group("key")
def command() -> None:
    """Make the keys of a pool.

    \b
      kvferry key new > ticket.key                                      all workers of the pool
      kvferry key gateway --ticket-key-file ticket.key > gateway.key    its gateways
      kvferry key operator --ticket-key-file ticket.key                 programs that drain workers

    Keep the files readable for their owner only. A gateway needs only its own key: it cannot make tickets, claim pages
    or drain workers.
    """


@command.command("new")
def new() -> None:
    """Print a new random ticket key."""
    click.echo(secrets.token_hex(32))


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
