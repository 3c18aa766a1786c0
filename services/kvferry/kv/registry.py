"""Registry of transports by connector name. Each module is imported on first use, so that NIXL remains optional."""

from importlib import import_module
from typing import cast

from kvferry.core.errors import UsageError
from kvferry.core.ids import Incarnation
from kvferry.kv.interface.connector import Transport, TransportSetup

_MODULES = {
    "memory": "kvferry.kv.connectors.memory",
    "nixl": "kvferry.kv.connectors.nixl",
    "shm": "kvferry.kv.connectors.shm",
    "tcp": "kvferry.kv.connectors.tcp",
}


def names() -> list[str]:
    """Return the names of all known connectors, sorted."""
    return sorted(_MODULES)


def open_transport(name: str, incarnation: Incarnation, setup: TransportSetup | None = None) -> Transport:
    """Create the transport of one incarnation of a worker.

    Args:
        name: name of a connector, one of `names()`.
        incarnation: incarnation of this worker.
        setup: configuration of the transport; the default if `None`.

    Raises:
        UsageError: `name` is not a known connector, a package that it needs is not installed, or this machine has no
            device that it can use.
    """
    if name not in _MODULES:
        raise UsageError(f"unknown connector {name!r}; use one of {', '.join(names())}", field="connector")
    try:
        module = import_module(_MODULES[name])
    except ImportError as error:
        raise UsageError(
            f"connector {name!r} needs a package that is not installed ({error.name}); "
            f"install it with: pip install 'kvferry[{name}]'",
            field="connector",
        ) from error
    return cast(Transport, module.open_transport(incarnation, setup or TransportSetup()))
