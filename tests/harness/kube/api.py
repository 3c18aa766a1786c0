"""A minimal API server client for starting a cluster: GET with a token, polled until a condition holds."""

import http.client
import json
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvferry.core.clock import Clock
from kvferry.core.errors import Unavailable

_CALL_SECONDS = 5.0
_POLL_SECONDS = 0.05


@dataclass(slots=True)
class Api:
    """Client of an API server."""

    url: str
    token: str
    authority: Path
    clock: Clock
    _context: ssl.SSLContext | None = field(default=None)

    def get(self, path: str) -> tuple[int, bytes]:
        """Send a GET request and return status and body.

        Raises:
            OSError: the server does not respond.
        """
        if self._context is None:
            self._context = ssl.create_default_context(cafile=str(self.authority))
        split = urlsplit(self.url)
        call = http.client.HTTPSConnection(
            split.hostname or "", split.port, timeout=_CALL_SECONDS, context=self._context
        )
        try:
            call.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
            answer = call.getresponse()
            return answer.status, answer.read()
        except http.client.HTTPException as error:
            raise OSError(f"{path}: {error!r}") from error
        finally:
            call.close()

    def wait(
        self,
        path: str,
        wanted: Callable[[Any], bool] | None = None,
        *,
        seconds: float,
        meanwhile: Callable[[], None],
    ) -> None:
        """Wait until GET `path` returns status 200 and a JSON body for which `wanted` is true.

        Args:
            meanwhile: called before each attempt; stops the waiting if it raises.

        Raises:
            Unavailable: the condition does not hold within `seconds`.
        """
        pause = threading.Event()
        deadline = self.clock.monotonic() + seconds
        last: object = None
        while True:
            meanwhile()
            try:
                status, body = self.get(path)
                if status == 200 and (wanted is None or wanted(json.loads(body))):
                    return
                last = f"{status}: {body[:300]!r}"
            except OSError as error:
                last = error
            if self.clock.monotonic() > deadline:
                raise Unavailable(f"{self.url}{path} is not as expected after {seconds:.0f} s; last: {last}")
            pause.wait(_POLL_SECONDS)
