"""Keys with which a gateway signs its calls to workers, read from a file that may be replaced while it runs."""

import logging
from collections.abc import Callable

from kvferry.core.errors import UsageError
from kvferry.rpc.access.call_keys import CallSigner
from kvferry.rpc.access.table import CallerRole

_log = logging.getLogger(__name__)
_KEY_BYTES = 32
_MAX_KEYS = 4
"""Number of newest keys that are kept: while a pool's keys are replaced, each worker accepts one of several."""


class WorkerKeys:
    """Signers of a gateway's calls, newest first. Earlier keys are kept when the file changes, for workers that still
    have them."""

    def __init__(self, read: Callable[[], list[bytes]]) -> None:
        """
        Args:
            read: function that returns the lines of the key file, newest key first; called again by `renew`.

        Raises:
            UsageError: the key is missing or malformed.
        """
        self._read = read
        self._keys = [_parsed(read())]
        self._failure = ""
        self.signers = self._made()
        """A signer for each key, newest first; replaced when the file changes."""

    def renew(self) -> None:
        """Read the file again; if it cannot be read, or has no valid key, keep the known keys."""
        try:
            key = _parsed(self._read())
        except UsageError as error:
            if str(error) != self._failure:  # called at each poll of a worker that rejects the keys
                _log.warning("the gateway key cannot be read again: %s", error)
            self._failure = str(error)
            return
        self._failure = ""
        if key != self._keys[0]:
            self._keys = [key, *(known for known in self._keys if known != key)][:_MAX_KEYS]
            self.signers = self._made()
            _log.info("the gateway key was replaced")

    def _made(self) -> tuple[CallSigner, ...]:
        return tuple(CallSigner(CallerRole.GATEWAY, key) for key in self._keys)


def _parsed(lines: list[bytes]) -> bytes:
    """Parse the first line, 64 hexadecimal digits.

    Raises:
        UsageError: the key is missing or malformed.
    """
    if not lines:
        raise UsageError(
            "no gateway key, without which workers reject all calls; create one from the workers' ticket key with "
            "`kvferry key gateway --ticket-key-file ticket.key > gateway.key`, and set --gateway-key-file gateway.key",
            field="gateway_key_file",
        )
    try:
        key = bytes.fromhex(lines[0].decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise UsageError(
            "the gateway key is not 64 hexadecimal digits; create it with `kvferry key gateway`", field="gateway_key"
        )
    return key
