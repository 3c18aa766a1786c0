"""One Redis server: a few connections, each used by one thread at a time, behind a circuit breaker.

    admit (breaker closed?) ──► take a connection ──► the caller's exchange ──► give it back
                                                            └── lost: close it, count; a few in a row open the breaker
    breaker open: refuse at once; when the backoff is over, the next request starts a thread that looks (PING)

The server's name is resolved when the tier starts and by whoever looks, not by requests: a resolver has no deadline.
Further servers of a cluster are resolved when they are first heard of; they give addresses, not names.
"""

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from kvferry.core.clock import Clock
from kvferry.kv.tiers.breaker import Breaker, BreakerTimes
from kvferry.kv.tiers.hedge import HedgePolicy
from kvferry.kv.tiers.redis_options import RedisOptions, remedy
from kvferry.kv.tiers.resp import Lost, ServerError, TooLate, Wire, command
from kvferry.kv.tiers.slots import Address
from kvferry.kv.tiers.tier import TierError

T = TypeVar("T")

_log = logging.getLogger(__name__)

PROBE_SECONDS = 2.0
_JOIN_SECONDS = 2 * PROBE_SECONDS


class OutOfOrder(TierError):
    """The breaker is open: nobody was asked."""


class Link:
    """All that is known of one server. Safe to use from several threads."""

    def __init__(
        self, options: RedisOptions, address: Address, clock: Clock, times: BreakerTimes, tls: ssl.SSLContext | None
    ) -> None:
        self._options = options
        self._address = address
        self._clock = clock
        self._tls = tls
        self._found: tuple[int, Any] | None = None
        """Family and socket address, as resolved last."""
        self._breaker = Breaker(times)
        self._hedge = HedgePolicy()
        self._idle: list[Wire] = []
        self._num_open = 0
        self._num_storing = 0
        self._max_storing = max(1, options.connections - 1)  # stores never take the last way for loads
        self._looker: threading.Thread | None = None
        self._is_closed = False
        # Guards all of the above; nothing that waits for the server is called while it is held.
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        """Told when a connection is free."""

    def resolve(self) -> None:
        """Find the server's address.

        Raises:
            OSError: the name is unknown.
        """
        host, port = self._address
        if not port:
            self._found = (socket.AF_UNIX, host)
            return
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._found = (found[0], found[4])

    def exchange(self, deadline: float, action: Callable[[Wire], T], *, storing: bool = False) -> T:
        """Carry out `action` with a connection of its own.

        Raises:
            TierError: the server is out of order, or every connection was in use until the deadline.
            ServerError: the server answered with an error.
        """
        started = self._clock.monotonic()
        wire: Wire | None = None
        verdict: float | None = None
        try:
            wire = self._take(deadline, storing)
            result = action(wire)
            verdict = 0.0
            return result
        except Lost as error:
            verdict = self._clock.monotonic() - started if isinstance(error, TooLate) else float("inf")
            raise TierError(f"tier {self._options.text}: {error}") from error
        except ServerError as error:
            verdict = float("inf") if error.code == "LOADING" else 0.0
            raise
        except TierError:
            raise  # refused by us, or damaged: says nothing about the server, and leaves the connection in step
        except BaseException:
            if wire is not None:
                wire.close()  # nobody knows where in the stream it stands
            raise
        finally:
            self._settle(wire, storing, verdict)

    def patience_seconds(self) -> float | None:
        """How long to wait for a load before it is asked for a second time; `None`: it is not."""
        with self._lock:
            return self._hedge.wait_seconds()

    @contextmanager
    def spare(self) -> Iterator[Wire | None]:
        """An idle connection for a second request, if there is one just now and the budget allows it."""
        with self._lock:
            wire = self._pop_idle() if self._idle and self._hedge.spend() else None
        try:
            yield wire
        finally:
            if wire is not None:
                with self._lock:
                    self._put_back(wire)

    def note_load(self, seconds: float, *, hedged: bool, by_second: bool) -> None:
        """A load is over: it sets the patience for the next ones."""
        with self._lock:
            self._hedge.loaded(seconds, hedged=hedged, by_second=by_second)

    @property
    def hedges(self) -> tuple[int, int]:
        """Second requests sent, and those that were answered first."""
        with self._lock:
            return self._hedge.num_hedges, self._hedge.num_won

    def probe(self, deadline: float) -> None:
        """Open a connection and ask whether somebody answers.

        Raises:
            Lost, ServerError: nobody does, or not as hoped.
        """
        wire = self._connect(deadline)
        try:
            wire.send([command(b"PING")], deadline)
            wire.reply(deadline)
        finally:
            wire.close()

    def close(self) -> None:
        """Close idle connections, and those in use when they come back. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            self._num_open -= len(idle)
            looker = self._looker
            self._free.notify_all()
        for wire in idle:
            wire.close()
        if looker is not None:
            looker.join(_JOIN_SECONDS)

    # ------------------------------------------------------------------ breaker

    def _admit(self) -> None:
        """Under the lock.

        Raises:
            OutOfOrder: closed, or the breaker is open.
        """
        if self._is_closed:
            raise OutOfOrder(f"tier {self._options.text}: closed")
        if self._breaker.passes:
            return
        if self._breaker.look(self._clock.monotonic()):
            self._looker = threading.Thread(target=self._look, name="kv-redis-probe", daemon=True)
            self._looker.start()
        raise OutOfOrder(f"tier {self._options.text}: did not answer lately; its breaker is open")

    def _look(self) -> None:
        alive = False
        try:
            self.resolve()
            self.probe(self._clock.monotonic() + PROBE_SECONDS)
            alive = True
        except ServerError as error:
            alive = error.code != "LOADING"  # whoever refuses is there; its requests will say what is wrong
        except (Lost, OSError):
            pass
        with self._lock:
            self._breaker.looked(self._clock.monotonic(), alive=alive)
        if alive:
            _log.info("tier %s answers again", self._options.text)

    def _settle(self, wire: Wire | None, storing: bool, verdict: float | None) -> None:
        """An exchange is over.

        Args:
            verdict: seconds waited in vain; 0 when the server answered, `None` when it was not asked.
        """
        dropped: list[Wire] = []
        with self._lock:
            if verdict == 0.0:
                self._breaker.succeeded()
            elif verdict is not None and self._breaker.passes:
                self._breaker.failed(self._clock.monotonic(), verdict)
                if not self._breaker.passes:
                    dropped, self._idle = self._idle, []
                    self._num_open -= len(dropped)
                    self._free.notify_all()
                    _log.warning("tier %s does not answer; it is left alone for a while", self._options.text)
            if wire is not None:
                self._num_storing -= storing
                self._put_back(wire)
        for idle in dropped:
            idle.close()

    # ------------------------------------------------------------------ connections

    def _take(self, deadline: float, storing: bool) -> Wire:
        with self._lock:
            while True:
                self._admit()
                if not storing or self._num_storing < self._max_storing:
                    wire = self._pop_idle()
                    if wire is not None or self._num_open < self._options.connections:
                        break
                left = deadline - self._clock.monotonic()
                if left <= 0 or not self._free.wait(left):
                    raise TierError(
                        f"tier {self._options.text}: all {self._options.connections} connections are in use; "
                        "raise connections="
                    )
            self._num_storing += storing
            if wire is not None:
                return wire
            self._num_open += 1
        try:
            return self._connect(deadline)
        except BaseException:
            with self._lock:
                self._num_open -= 1
                self._num_storing -= storing
                self._free.notify()
            raise

    def _pop_idle(self) -> Wire | None:
        """An idle connection that is still quiet: one that has something to say was closed, or is out of step."""
        while self._idle:
            wire = self._idle.pop()
            if wire.is_quiet():
                return wire
            wire.close()
            self._num_open -= 1
        return None

    def _put_back(self, wire: Wire) -> None:
        if self._is_closed or not self._breaker.passes:
            wire.close()
        if wire.is_closed:
            self._num_open -= 1
        else:
            self._idle.append(wire)
        self._free.notify()

    def _connect(self, deadline: float) -> Wire:
        """A connection that has been let in.

        Raises:
            Lost: nobody answers in time.
            ServerError: we are not let in.
        """
        try:
            wire = Wire(self._open_socket(deadline), self._clock)
        except ssl.SSLCertVerificationError as error:
            raise Lost("its certificate is not valid for this host; name its authority with cacert=") from error
        except TimeoutError as error:
            raise TooLate("no connection in time") from error
        except OSError as error:
            raise Lost(f"no connection ({error.strerror or type(error).__name__})") from error
        options = self._options
        try:
            if options.password:
                who = [options.username.encode()] if options.username else []
                wire.send([command(b"AUTH", *who, options.password.encode())], deadline)
                wire.reply(deadline)
            if options.db:
                wire.send([command(b"SELECT", b"%d" % options.db)], deadline)
                wire.reply(deadline)
        except BaseException:
            wire.close()
            raise
        return wire

    def _open_socket(self, deadline: float) -> socket.socket:
        if self._found is None:
            self.resolve()
        assert self._found is not None
        family, where = self._found
        left = deadline - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError
        opened = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family != socket.AF_UNIX:
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.settimeout(left)
            opened.connect(where)
            if self._tls is None:
                return opened
            return self._tls.wrap_socket(opened, server_hostname=self._address[0])
        except BaseException:
            with suppress(OSError):
                opened.close()
            raise


def refused(options: RedisOptions, error: ServerError) -> TierError:
    """The server's error with what to do about it."""
    return TierError(f"tier {options.text}: {remedy(error.code)}")
