"""Connection pool of one Redis server, guarded by a circuit breaker. Each connection is used by one thread at a time.

    admit (breaker closed?) ──► take a connection ──► the caller's exchange ──► return it
                                                            └── lost: close it, count; a few in a row open the breaker
    breaker open: reject; after the backoff, the next request starts a probe thread (PING)

The server's host name is resolved at the start of the tier and by the probe thread, not by requests, since a resolver
has no deadline. Other servers of a cluster are resolved when they are first used; the slot map has addresses, not host
names.
"""

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from kvferry.core.clock import Clock
from kvferry.kv.tiers.interface.tier import TierError
from kvferry.kv.tiers.policy.breaker import Breaker, BreakerTimes
from kvferry.kv.tiers.policy.hedge import HedgePolicy
from kvferry.kv.tiers.policy.redis_slots import Address
from kvferry.kv.tiers.redis.options import RedisOptions, remedy
from kvferry.kv.tiers.redis.redis_client import ConnectionLost, ReplyTimeout, ServerError, Wire, command

T = TypeVar("T")

_log = logging.getLogger(__name__)

PROBE_SECONDS = 2.0
_JOIN_SECONDS = 2 * PROBE_SECONDS


class BreakerOpen(TierError):
    """The breaker is open: no request was sent."""


class Link:
    """Connections, breaker and hedging policy of one server. Thread-safe."""

    def __init__(
        self, options: RedisOptions, address: Address, clock: Clock, times: BreakerTimes, tls: ssl.SSLContext | None
    ) -> None:
        """
        Args:
            options: options of the tier's URL.
            address: host and port of the server.
            clock: clock of the breaker and of deadlines.
            times: thresholds and pauses of the breaker.
            tls: TLS context; `None` for plain connections.
        """
        self._options = options
        self._address = address
        self._clock = clock
        self._tls = tls
        self._found: tuple[int, Any] | None = None
        """Address family and socket address from the last resolution."""
        self._breaker = Breaker(times)
        self._hedge = HedgePolicy()
        self._idle: list[Wire] = []
        self._num_open = 0
        self._num_storing = 0
        self._max_storing = max(1, options.connections - 1)  # one connection is reserved for loads
        self._looker: threading.Thread | None = None
        self._is_closed = False
        # Guards all fields above; not held while waiting for the server.
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        """Notified when a connection becomes free."""

    def resolve(self) -> None:
        """Resolve the server's host name.

        Raises:
            OSError: the name cannot be resolved.
        """
        host, port = self._address
        if not port:
            self._found = (socket.AF_UNIX, host)
            return
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._found = (found[0], found[4])

    def exchange(self, deadline: float, action: Callable[[Wire], T], *, storing: bool = False) -> T:
        """Run `action` with exclusive use of a connection.

        Args:
            deadline: monotonic seconds.
            action: sends commands over the connection and reads their replies.
            storing: whether the action stores an object; such actions use at most a part of the connections.

        Raises:
            TierError: the server failed, or all connections were in use until the deadline.
            ServerError: the server answered with an error.
        """
        started = self._clock.monotonic()
        wire: Wire | None = None
        unanswered_seconds: float | None = None
        try:
            wire = self._take(deadline, storing)
            result = action(wire)
            unanswered_seconds = 0.0
            return result
        except ConnectionLost as error:
            unanswered_seconds = self._clock.monotonic() - started if isinstance(error, ReplyTimeout) else float("inf")
            raise TierError(f"tier {self._options.text}: {error}") from error
        except ServerError as error:
            unanswered_seconds = float("inf") if error.code == "LOADING" else 0.0
            raise
        except TierError:
            raise  # rejected by this worker, or damaged content: the server works, and the connection is in sync
        except BaseException:
            if wire is not None:
                wire.close()  # the position in the stream is unknown
            raise
        finally:
            self._settle(wire, storing, unanswered_seconds)

    def patience_seconds(self) -> float | None:
        """Return how long to wait for a load before a hedged request is sent, in seconds; `None` to send none."""
        with self._lock:
            return self._hedge.wait_seconds()

    @contextmanager
    def spare(self) -> Iterator[Wire | None]:
        """Take an idle connection for a hedged request; `None` if no connection is idle or the budget is exhausted."""
        with self._lock:
            wire = self._pop_idle() if self._idle and self._hedge.spend() else None
        try:
            yield wire
        finally:
            if wire is not None:
                with self._lock:
                    self._put_back(wire)

    def note_load(self, seconds: float, *, hedged: bool, by_second: bool) -> None:
        """Record the duration of a load; the delay before a hedged request is derived from these durations.

        Args:
            seconds: duration of the load.
            hedged: whether a hedged request was sent.
            by_second: whether the hedged request completed first.
        """
        with self._lock:
            self._hedge.loaded(seconds, hedged=hedged, by_second=by_second)

    @property
    def hedges(self) -> tuple[int, int]:
        """Number of hedged requests sent, and number of hedged requests that completed first."""
        with self._lock:
            return self._hedge.num_hedges, self._hedge.num_won

    def probe(self, deadline: float) -> None:
        """Open a connection and send a PING.

        Args:
            deadline: monotonic seconds.

        Raises:
            ConnectionLost, ServerError: the server does not answer, or answers with an error.
        """
        wire = self._connect(deadline)
        try:
            wire.send([command(b"PING")], deadline)
            wire.reply(deadline)
        finally:
            wire.close()

    def close(self) -> None:
        """Close idle connections now; connections in use are closed when they are returned. Idempotent."""
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
        """Check the breaker, and start a probe if one is due; called with the lock held.

        Raises:
            BreakerOpen: the link is closed, or the breaker is open.
        """
        if self._is_closed:
            raise BreakerOpen(f"tier {self._options.text}: the tier is closed")
        if self._breaker.passes:
            return
        if self._breaker.probe(self._clock.monotonic()):
            self._looker = threading.Thread(target=self._look, name="kv-redis-probe", daemon=True)
            self._looker.start()
        raise BreakerOpen(f"tier {self._options.text}: did not answer recently; its circuit breaker is open")

    def _look(self) -> None:
        alive = False
        try:
            self.resolve()
            self.probe(self._clock.monotonic() + PROBE_SECONDS)
            alive = True
        except ServerError as error:
            alive = error.code != "LOADING"  # a server that rejects PING is reachable; requests report its error
        except (ConnectionLost, OSError):
            pass
        with self._lock:
            self._breaker.probed(self._clock.monotonic(), alive=alive)
        if alive:
            _log.info("tier %s answers again", self._options.text)

    def _settle(self, connection: Wire | None, storing: bool, unanswered_seconds: float | None) -> None:
        """Finish an exchange: update the breaker and return the connection to the pool.

        Args:
            connection: the connection of the exchange; `None` if no connection was taken.
            storing: whether the exchange was a store.
            unanswered_seconds: seconds waited if the server did not answer; 0 if it answered; `None` if no
                request was sent.
        """
        dropped: list[Wire] = []
        with self._lock:
            if unanswered_seconds == 0.0:
                self._breaker.succeeded()
            elif unanswered_seconds is not None and self._breaker.passes:
                self._breaker.failed(self._clock.monotonic(), unanswered_seconds)
                if not self._breaker.passes:
                    dropped, self._idle = self._idle, []
                    self._num_open -= len(dropped)
                    self._free.notify_all()
                    _log.warning("tier %s does not answer; its circuit breaker is now open", self._options.text)
            if connection is not None:
                self._num_storing -= storing
                self._put_back(connection)
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
        """Pop an idle connection without pending data. Pending data means that a connection was closed or is out of
        sync."""
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
        """Open and authenticate a connection.

        Raises:
            ConnectionLost: the server did not answer in time, or the connection failed.
            ServerError: authentication or database selection failed.
        """
        try:
            wire = Wire(self._open_socket(deadline), self._clock)
        except ssl.SSLCertVerificationError as error:
            raise ConnectionLost(
                "its certificate is not valid for this host; set its certificate authority with cacert="
            ) from error
        except TimeoutError as error:
            raise ReplyTimeout("no connection in time") from error
        except OSError as error:
            raise ConnectionLost(f"no connection ({error.strerror or type(error).__name__})") from error
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
    """Convert a server's error to a `TierError` with its remedy."""
    return TierError(f"tier {options.text}: {remedy(error.code)}")
