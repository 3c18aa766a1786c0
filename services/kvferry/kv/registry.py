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


def check_encryption(name: str) -> None:
    """Check that KV over a connector can be encrypted here. The bytes of `memory` and `shm` never leave the host, so
    that there is nothing to encrypt.

    Args:
        name: name of a connector.

    Raises:
        UsageError: the connector does not encrypt, or the package for encryption is not installed.
    """
    if name == "nixl":  # peers read registered pages as they are, and UCX does not encrypt
        raise UsageError(
            "kv_encryption: connector 'nixl' does not encrypt KV; use connector 'tcp', or leave kv_encryption off and "
            "encrypt the network",
            field="kv_encryption",
        )
    if name == "tcp":
        import_module("kvferry.kv.connectors.tcp_seal").check_package()


def open_transport(name: str, incarnation: Incarnation, setup: TransportSetup | None = None) -> Transport:
    """Create the transport of one incarnation of a worker.

    Args:
        name: name of a connector, one of `names()`.
        incarnation: incarnation of this worker.
        setup: configuration of the transport; the default if `None`.

    Raises:
        UsageError: `name` is not a known connector, a package that it needs is not installed, this machine has no
            device that it can use, or `setup` requires encryption that the connector does not have.
    """
    if name not in _MODULES:
        raise UsageError(f"unknown connector {name!r}; use one of {', '.join(names())}", field="connector")
    if setup is not None and setup.encrypts:
        check_encryption(name)
    try:
        module = import_module(_MODULES[name])
    except ImportError as error:
        raise UsageError(
            f"connector {name!r} needs a package that is not installed ({error.name}); "
            f"install it with: pip install 'kvferry[{name}]'",
            field="connector",
        ) from error
    return cast(Transport, module.open_transport(incarnation, setup or TransportSetup()))
