"""Discovery of kinds: waits for the operator's definitions, and tracks the optional kinds that the cluster serves."""

import asyncio
import logging
from collections.abc import Callable

from kvferry.core.errors import KvferryError
from kvferry.operator.api import KubeApi
from kvferry.operator.objects.support_objects import EXTENSION_POOL, POD_MONITOR
from kvferry.operator.pool import names

_log = logging.getLogger(__name__)
_DEFINITIONS_SECONDS = 5.0


async def wait_for_definitions(api: KubeApi) -> None:
    """Wait until the cluster serves InferencePool and PoolRoleScaler."""
    is_logged = False
    while True:
        try:
            served = [
                await asyncio.to_thread(api.serves, names.API_VERSION, plural)
                for plural in (names.POOLS, names.SCALERS)
            ]
            if all(served):
                return
            why = (
                f"the cluster does not serve {names.POOLS} and {names.SCALERS} of {names.API_VERSION}; "
                "apply charts/kvferry/files/crds"
            )
        except KvferryError as error:
            why = error.message
        if not is_logged:
            _log.warning("waiting: %s", why)
            is_logged = True
        await asyncio.sleep(_DEFINITIONS_SECONDS)


class OptionalKinds:
    """Optional kinds, defined by other projects, that the cluster serves."""

    def __init__(self, api: KubeApi, changed: Callable[[], None]) -> None:
        """
        Args:
            api: client of the cluster's API server.
            changed: called after a kind was installed or removed.
        """
        self._api = api
        self._changed = changed
        self._installed: frozenset[tuple[str, str]] = frozenset()

    def installed(self) -> frozenset[tuple[str, str]]:
        """Return the optional kinds as (apiVersion, plural), from the last discovery. Thread-safe."""
        return self._installed

    async def refresh(self) -> None:
        """Run the discovery once; keep the last result if the API server is unavailable."""
        try:
            found = [kind for kind in (POD_MONITOR, EXTENSION_POOL) if await asyncio.to_thread(self._api.serves, *kind)]
        except KvferryError as error:
            _log.warning("discovery of optional kinds failed: %s", error.message)
            return
        before, self._installed = self._installed, frozenset(found)
        if before != self._installed:
            self._changed()

    async def run(self, period: float) -> None:
        """Discover optional kinds every `period` seconds until cancelled."""
        while True:
            await asyncio.sleep(period)
            await self.refresh()
