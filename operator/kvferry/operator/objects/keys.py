"""Entries of the Secret with a pool's keys. Pure."""

from kvferry.rpc.access.call_keys import role_key
from kvferry.rpc.access.table import CallerRole

KEY_ENTRIES = ("ticket-key", "tenant-key", "gateway-key")
"""Entries of the Secret: workers mount all, gateways only the last two."""


def key_secret_data(ticket_key: str, tenant_key: str) -> dict[str, str]:
    """Return the value of each entry. The gateway's key is derived from the ticket key, which gateways do not get."""
    gateway_key = role_key(ticket_key.encode(), CallerRole.GATEWAY).hex()
    return dict(zip(KEY_ENTRIES, (ticket_key, tenant_key, gateway_key), strict=True))
