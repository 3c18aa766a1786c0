"""The endpoints of a pool: fixed, or the pods of an InferencePool as the API server lists them."""

import asyncio
import logging

from kvferry.core.clock import Clock
from kvferry.picker.config import PickerConfig
from kvferry.picker.decide.endpoints import EndpointStates

_log = logging.getLogger(__name__)


class PoolMembers:
    """Updates the endpoints of one pool. `run` is a background task."""

    def __init__(self, config: PickerConfig, states: EndpointStates, clock: Clock) -> None:
        """
        Args:
            config: all settings.
            states: the endpoints, which are updated.
            clock: clock of retries.
        """
        self._config = config
        self._states = states
        self._clock = clock
        self.is_known = False
        """Whether the endpoints were listed."""

    def connect(self) -> None:
        """List the fixed endpoints."""
        self._states.follow(self._config.endpoints)
        self.is_known = True

    async def run(self) -> None:
        """Follow the list until cancelled."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """Close the connections."""
