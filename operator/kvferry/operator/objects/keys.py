"""Entries of the Secret with a pool's keys. Pure."""

from kvferry.rpc.access.call_keys import role_key
from kvferry.rpc.access.table import CallerRole

ADMIN_ENTRY = "admin-token"
"""Entry with the token of changes by the gateways' admin ports. A Secret of an earlier release or of the user may not
have it; gateways then refuse changes."""
KEY_ENTRIES = ("ticket-key", "tenant-key", "gateway-key", ADMIN_ENTRY)
"""Entries of the Secret: workers mount all, gateways all but the first."""


def key_secret_data(ticket_key: str, tenant_key: str, admin_token: str) -> dict[str, str]:
    """Return the value of each entry. The gateway's key is derived from the ticket key, which gateways do not get."""
    gateway_key = role_key(ticket_key.encode(), CallerRole.GATEWAY).hex()
    return dict(zip(KEY_ENTRIES, (ticket_key, tenant_key, gateway_key, admin_token), strict=True))
