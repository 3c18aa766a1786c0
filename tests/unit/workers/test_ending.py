"""Exit of a worker's process."""

import asyncio
import signal

import pytest

from kvferry.core.errors import KvferryError
from kvferry.core.settings.engine import EngineSettings
from kvferry.workers.build import UnitEndpoint
from kvferry.workers.config import WorkerConfig
from kvferry.workers.main import run_worker


def test_no_signal_is_written_to_a_loop_that_is_being_closed() -> None:
    """asyncio closes the loop's end of the wakeup pipe before it removes the signal handlers, so a signal in between
    would fail.
    """

    async def written_to() -> int:
        place = UnitEndpoint("prefill", "127.0.0.1:0", "127.0.0.1:0")
        engine = EngineSettings("there-is-no-such-model")
        config = WorkerConfig("prefill", engine, connector="tcp", ticket_secrets=(b"0123456789abcdef",))
        with pytest.raises(KvferryError):
            await run_worker(config, [place], lambda event: None)
        return signal.set_wakeup_fd(-1)

    assert asyncio.run(written_to()) == -1
