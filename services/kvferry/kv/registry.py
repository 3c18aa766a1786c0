"""Transports by name, imported only when named, so that nobody pays for NIXL who does not use it."""

from importlib import import_module
from typing import cast

from kvferry.core.errors import UsageError
from kvferry.core.ids import Incarnation
from kvferry.kv.connector import Transport, TransportSetup

_MODULES = {
    "memory": "kvferry.kv.connectors.memory",
    "nixl": "kvferry.kv.connectors.nixl",
    "shm": "kvferry.kv.connectors.shm",
    "tcp": "kvferry.kv.connectors.tcp",
}


def names() -> list[str]:
    """The connectors there are."""
    return sorted(_MODULES)


def open_transport(name: str, incarnation: Incarnation, setup: TransportSetup | None = None) -> Transport:
    """A new transport for one worker's life.

    Raises:
        UsageError: no such connector, or what it needs is not installed.
    """
    if name not in _MODULES:
        raise UsageError(f"there is no connector {name!r}; known are {', '.join(names())}", field="connector")
    try:
        module = import_module(_MODULES[name])
    except ImportError as error:
        raise UsageError(
            f"connector {name!r} needs a package that is not installed ({error.name}); "
            f"install it with: pip install 'kvferry[{name}]'",
            field="connector",
        ) from error
    return cast(Transport, module.open_transport(incarnation, setup or TransportSetup()))
