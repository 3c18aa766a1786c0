"""Process of a rank other than the first: loads its share of the model, then computes the steps that it receives.

It exits when the first rank's process does, and when a step fails, which the first rank notices.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection

from kvferry.core.errors import KvferryError
from kvferry.core.process import logs
from kvferry.core.process.config import environment
from kvferry.core.process.memory_file import open_memory
from kvferry.engine.execute.models.compiled_adapter import CompiledAdapter
from kvferry.engine.execute.ranks.messages import (
    RankAdapter,
    RankPages,
    RankReady,
    RankStart,
    RankStep,
    receive,
    receive_any,
    send,
    unpacked_batch,
)
from kvferry.engine.execute.ranks.share_model import (
    SharedPages,
    load_share,
    on_cores,
    open_pages,
    open_share,
    received_adapter,
)
from kvferry.weights.shares import Share

_log = logging.getLogger("kvferry.engine.execute.ranks.rank_process")  # this module runs as __main__


class _Rank:
    """One rank's share of a model, with the pages of the engines that use it."""

    def __init__(self, start: RankStart) -> None:
        """
        Raises:
            KvferryError: the share cannot be loaded.
        """
        share = Share(start.rank, start.plan.size)
        self._config, tensors = open_share(start.plan)
        self._model = load_share(start.plan, self._config, tensors, share, open_memory(start.sums))
        self._pages: dict[int, SharedPages] = {}
        self._adapters: dict[int, CompiledAdapter] = {}

    def add_pages(self, pages: RankPages) -> None:
        self._pages[pages.index] = open_pages(pages, self._config.vocab_size)

    def add_adapter(self, message: RankAdapter) -> None:
        self._forget(message.forgotten)
        self._adapters[message.number] = self._model.pack_adapter(received_adapter(message))

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._adapters.pop(number, None)

    def compute(self, step: RankStep) -> None:
        self._forget(step.forgotten)
        batch = unpacked_batch(step.batch)
        if step.adapters:
            batch = replace(batch, adapters=tuple(self._adapters[number] for number in step.adapters))
        pages = self._pages[step.index]
        self._model.compute_into(batch, pages.kv, pages.room_for(len(batch.sample_rows)))


def run(connection: Connection) -> None:
    """Load the share that the first message describes, then compute steps until the first rank's process ends.

    Raises:
        EOFError: the first rank's process has ended.
    """
    start = receive(connection, RankStart)
    logs.setup(
        logging.getLevelName(start.log_level),
        as_json=False,
        process=f"{environment().get(logs.LOG_NAME_VARIABLE, '')} rank-{start.rank}".strip(),
    )
    with ExitStack() as stack:
        stack.enter_context(on_cores(start.cores))
        try:
            rank = _Rank(start)
        except KvferryError as error:
            send(connection, RankReady(str(error), error.field or ""))
            return
        send(connection, RankReady())
        while True:
            message = receive_any(connection)
            if isinstance(message, RankStep):
                rank.compute(message)
            elif isinstance(message, RankAdapter):
                rank.add_adapter(message)
            elif isinstance(message, RankPages):
                rank.add_pages(message)
                send(connection, RankReady())


def _exit_with(lifeline: int) -> None:
    """Exit as soon as the first rank's process has ended, even during a step."""
    os.read(lifeline, 1)
    os._exit(1)


def main(descriptors: list[str]) -> None:
    """Run a rank.

    Args:
        descriptors: of the connection to the first rank, and of a pipe that ends with its process.
    """
    connection, lifeline = map(int, descriptors)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with, args=(lifeline,), name="lifeline", daemon=True).start()
    try:
        run(Connection(connection))
    except (EOFError, OSError):  # the first rank has ended, or has closed the model
        pass
    except Exception:
        _log.exception("the rank stops")
        os._exit(1)  # at once: the first rank waits for this one
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
