"""Redis tier: storage objects as framed values in a Redis server or a Redis Cluster.

    redis://[USER:PASSWORD@]HOST:PORT/DB?ttl=3600&connections=4&prefix=kv&cluster=off&encrypt=off
    rediss://...  (TLS)      redis+unix:///run/redis.sock

    lookup   one pipeline of STRLEN per server: a value with an unexpected length counts as missing
    load     GET directly into the buffers; late loads are hedged with another GET into a spare buffer
    store    SET NX with expiry, if STRLEN reports that the value is missing, so that existing values are not sent

A damaged value is removed, so that a later store can replace it. An unresponsive server causes a few time-outs until
the breaker opens. Lookups return only YES and NO, since Redis does not show that a value is being written.
"""

import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar

from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.kv.tiers.interface.frame import FrameDamaged, Frames, flat
from kvferry.kv.tiers.interface.spec import TierSpec
from kvferry.kv.tiers.interface.tier import ObjectKey, Presence, TierError, TierMiss
from kvferry.kv.tiers.policy.breaker import BreakerTimes
from kvferry.kv.tiers.policy.redis_slots import Address, Redirection, SlotMap, key_slot, parse_redirection
from kvferry.kv.tiers.redis.hedged_get import Getter
from kvferry.kv.tiers.redis.object_reader import KeyMissing
from kvferry.kv.tiers.redis.options import RedisOptions, redis_options, remedy
from kvferry.kv.tiers.redis.redis_client import CRLF, Reply, ServerError, Wire, command
from kvferry.kv.tiers.redis.server_link import BreakerOpen, Link, refused

T = TypeVar("T")

_START_SECONDS = 5.0
_CLEAN_UP_SECONDS = 0.5
_MAX_REDIRECTIONS = 3
_MAX_LINKS = 1024
_REFRESH_SECONDS = 1.0
_PIPELINE = 1024

_Leave: TypeAlias = Callable[[], Reply]
"""Function to call before each command; it sends ASKING if the slot is being migrated to this server."""


class RedisTier:
    """`Tier` that stores objects in a Redis server or Redis Cluster."""

    name = "redis"

    def __init__(self, options: RedisOptions, frames: Frames, clock: Clock, times: BreakerTimes | None = None) -> None:
        """
        Args:
            options: options of the tier's URL.
            frames: reads and writes the headers of objects.
            clock: clock of deadlines and breakers.
            times: thresholds and pauses of each server's breaker; `None` for the defaults.

        Raises:
            UsageError: the file with the certificate authority cannot be read.
        """
        self._options = options
        self._frames = frames
        self._clock = clock
        self._times = times or BreakerTimes()
        self._tls = _tls_context(options)
        self._slots = SlotMap()
        self._links: dict[Address, Link] = {}
        self._slots_fresh_until = float("-inf")
        self._is_closed = False
        self._getter = Getter(frames, clock, hedge=options.hedge)
        self._num_bytes = 0
        self._lock = threading.Lock()  # guards the slot map, the links, the byte count and _is_closed

    def start(self) -> None:
        """Run each of the tier's commands once, so that configuration errors are found at start.

        Raises:
            UsageError: the server is unreachable, or denies a command that the tier needs.
        """
        deadline = self._clock.monotonic() + _START_SECONDS
        link = self._link(self._options.address)
        unused_key = self._key_of(bytes(32))

        def try_out(wire: Wire) -> None:
            for words in ([b"PING"], [b"STRLEN", unused_key], [b"GET", unused_key]):
                try:
                    _ask(wire, deadline, *words)
                except ServerError as error:
                    if error.code not in ("MOVED", "ASK") or not self._options.cluster:
                        raise

        try:
            link.resolve()
            link.exchange(deadline, try_out)
            self._refresh_slots(deadline)
        except OSError as error:
            raise UsageError(
                f"tier {self._options.text}: its host name cannot be resolved ({error.strerror})", field="tier"
            ) from error
        except ServerError as error:
            raise UsageError(f"tier {self._options.text}: {remedy(error.code)}", field="tier") from error
        except TierError as error:
            raise UsageError(
                f"{error}; check that Redis is running and reachable from this host", field="tier"
            ) from error

    # ------------------------------------------------------------------ Tier

    def lookup(self, keys: Sequence[ObjectKey], timeout: float) -> list[Presence]:
        deadline = self._clock.monotonic() + timeout
        answers = [Presence.NO] * len(keys)
        by_link: dict[Address, list[int]] = {}
        for i, key in enumerate(keys):
            by_link.setdefault(self._where(self._key_of(key.name)), []).append(i)
        for address, indices in by_link.items():
            for at in range(0, len(indices), _PIPELINE):
                batch = indices[at : at + _PIPELINE]
                with suppress(TierError):
                    lengths = self._lengths(address, [self._key_of(keys[i].name) for i in batch], deadline)
                    for i, length in zip(batch, lengths, strict=True):
                        if length == self._frames.frame_bytes:
                            answers[i] = Presence.YES
        return answers

    def load(self, key: ObjectKey, into: Sequence[memoryview], timeout: float) -> None:
        deadline = self._clock.monotonic() + timeout
        views = flat(into, self._frames.object_bytes)
        stored = self._key_of(key.name)

        def get(link: Link, wire: Wire, leave: _Leave) -> bool:
            leave()
            try:
                self._getter.get(link, wire, key, stored, views, deadline)
            except KeyMissing:
                return False
            return True

        try:
            is_there = self._on_owner(stored, deadline, get)
        except FrameDamaged as error:
            self._remove(stored, deadline)
            raise FrameDamaged(f"tier {self._options.text}: {error}") from error
        except ServerError as error:
            if error.code == "WRONGTYPE":
                self._remove(stored, deadline)
                raise FrameDamaged(
                    f"tier {self._options.text}: a value of another type is stored under this name"
                ) from error
            raise refused(self._options, error) from error
        if not is_there:
            raise TierMiss(f"tier {self._options.text}: object not found")

    def store(self, key: ObjectKey, parts: Sequence[memoryview], timeout: float) -> bool:
        deadline = self._clock.monotonic() + timeout
        views = flat(parts, self._frames.object_bytes)
        stored = self._key_of(key.name)

        def put(_link: Link, wire: Wire, leave: _Leave) -> bool:
            leave()
            try:
                length = _ask(wire, deadline, b"STRLEN", stored)
            except ServerError as error:
                if error.code != "WRONGTYPE":
                    raise
                length = -1
            if length == self._frames.frame_bytes:
                return False
            header, pages = self._frames.frame(key, views)
            leave()
            wire.send(self._set(stored, header, pages, only_new=length == 0), deadline)
            return wire.reply(deadline) == b"OK"

        try:
            was_written = self._on_owner(stored, deadline, put, storing=True)
        except ServerError as error:
            raise refused(self._options, error) from error
        if was_written:
            with self._lock:
                self._num_bytes += self._frames.frame_bytes
        return was_written

    @property
    def num_bytes(self) -> int:
        """Number of bytes written by this worker, including values that Redis has since evicted or expired."""
        with self._lock:
            return self._num_bytes

    @property
    def hedges(self) -> tuple[int, int]:
        """Number of hedged requests sent, and number of hedged requests that completed first."""
        with self._lock:
            links = list(self._links.values())
        counts = [link.hedges for link in links]
        return sum(sent for sent, _ in counts), sum(won for _, won in counts)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            links = list(self._links.values())
        for link in links:
            link.close()

    # ------------------------------------------------------------------ routing

    def _on_owner(
        self, stored: bytes, deadline: float, action: Callable[[Link, Wire, _Leave], T], *, storing: bool = False
    ) -> T:
        """Run `action` on the server that has the key; follow redirections of the cluster.

        Raises:
            TierError: the server failed, or redirected too often.
            ServerError: the server answered with an error.
        """
        address = self._where(stored)
        is_asking = False
        for _ in range(1 + _MAX_REDIRECTIONS):
            link = self._link(address)

            def carry_out(wire: Wire, link: Link = link, is_asking: bool = is_asking) -> T:
                return action(link, wire, lambda: _ask(wire, deadline, b"ASKING") if is_asking else None)

            try:
                return link.exchange(deadline, carry_out, storing=storing)
            except ServerError as error:
                there = parse_redirection(str(error), address) if self._options.cluster else None
                if there is None:
                    raise
                self._note(there, deadline)
                address, is_asking = there.address, not there.is_final
            except BreakerOpen:
                self._refresh_slots(deadline)  # a different server may have the slots now
                raise
        raise TierError(f"tier {self._options.text}: redirected {_MAX_REDIRECTIONS} times; check CLUSTER NODES")

    def _key_of(self, name: bytes) -> bytes:
        return b"%b:%b" % (self._options.prefix.encode(), name.hex().encode())

    def _where(self, stored: bytes) -> Address:
        if not self._options.cluster:
            return self._options.address
        with self._lock:
            return self._slots.find(key_slot(stored)) or self._options.address

    def _link(self, address: Address) -> Link:
        with self._lock:
            link = self._links.get(address)
            if link is None:
                if self._is_closed:
                    raise TierError(f"tier {self._options.text}: the tier is closed")
                if len(self._links) >= _MAX_LINKS:
                    raise TierError(
                        f"tier {self._options.text}: the cluster has more than {_MAX_LINKS} servers, the maximum"
                    )
                link = Link(self._options, address, self._clock, self._times, self._tls)
                self._links[address] = link
            return link

    def _note(self, there: Redirection, deadline: float) -> None:
        if not there.is_final:
            return
        with self._lock:
            self._slots.note(there)
        self._refresh_slots(deadline)

    def _refresh_slots(self, deadline: float) -> None:
        """Read the slot map from any server that answers, at most once per second. After a failure, a later call
        retries."""
        now = self._clock.monotonic()
        with self._lock:
            if not self._options.cluster or now < self._slots_fresh_until:
                return
            self._slots_fresh_until = now + _REFRESH_SECONDS
            addresses = {self._options.address, *self._slots.addresses}
        deadline = min(deadline, now + _CLEAN_UP_SECONDS)
        for address in addresses:
            with suppress(TierError, ServerError):
                reply = self._link(address).exchange(deadline, lambda w: _ask(w, deadline, b"CLUSTER", b"SLOTS"))
                with self._lock, suppress(ValueError):
                    self._slots.replace(reply, address)
                    return

    # ------------------------------------------------------------------ exchanges

    def _lengths(self, address: Address, stored: Sequence[bytes], deadline: float) -> list[int]:
        """Read the lengths of values; 0 if a value is missing or its slot is on a different server."""

        def ask(wire: Wire) -> list[int]:
            wire.send([b"".join(command(b"STRLEN", key) for key in stored)], deadline)
            lengths = []
            for _ in stored:
                try:
                    length = wire.reply(deadline)
                except ServerError as error:
                    errors.append(error)
                    length = 0
                lengths.append(length if isinstance(length, int) else 0)
            return lengths

        errors: list[ServerError] = []
        lengths = self._link(address).exchange(deadline, ask)
        for error in errors:
            there = parse_redirection(str(error), address) if self._options.cluster else None
            if there is not None:
                self._note(there, deadline)
        return lengths

    def _set(
        self, stored: bytes, header: bytes, pages: Sequence[memoryview], *, only_new: bool
    ) -> list[bytes | memoryview]:
        """Encode a SET command as a list of buffers, without copying the value."""
        options = [b"NX"] if only_new else []
        if self._options.ttl_seconds:
            # The time to live varies by a tenth, depending on the name, so that objects stored together do not expire
            # together.
            spread = stored[-1] * self._options.ttl_seconds // 2560
            options += [b"EX", b"%d" % max(1, self._options.ttl_seconds - spread)]
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n" % (3 + len(options), len(stored), stored)
        head += b"$%d\r\n" % self._frames.frame_bytes + header
        tail = CRLF + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in options)
        return [head, *pages, tail]

    def _remove(self, stored: bytes, deadline: float) -> None:
        """Remove a damaged value, since it would prevent a later store under its name."""
        deadline = min(deadline, self._clock.monotonic() + _CLEAN_UP_SECONDS)

        def unlink(_link: Link, wire: Wire, leave: _Leave) -> Reply:
            leave()
            return _ask(wire, deadline, b"UNLINK", stored)

        with suppress(TierError, ServerError):
            self._on_owner(stored, deadline, unlink)


def _ask(wire: Wire, deadline: float, *words: bytes) -> Reply:
    """Send one short command and read its reply.

    Raises:
        ServerError, ConnectionLost: see `Wire.reply`.
    """
    wire.send([command(*words)], deadline)
    return wire.reply(deadline)


def _tls_context(options: RedisOptions) -> ssl.SSLContext | None:
    if not options.is_tls:
        return None
    try:
        context = ssl.create_default_context(cafile=options.cacert or None)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"tier {options.text}: cannot read cacert={options.cacert!r}", field="tier") from error
    if not options.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def open_tier(
    spec: TierSpec, *, object_bytes: int, secret: bytes, clock: Clock, times: BreakerTimes | None = None
) -> RedisTier:
    """Open a Redis tier and check that it can be used.

    Args:
        spec: the parsed URL.
        object_bytes: length of every object.
        secret: the pool's tier secret, at least 16 bytes.
        clock: clock of the deadlines and of the circuit breakers.
        times: thresholds of the circuit breakers; default: `BreakerTimes()`.

    Raises:
        UsageError: an option is invalid, a package is missing, or Redis is unreachable or denies access.
    """
    options = redis_options(spec)
    tier = RedisTier(options, Frames(secret, object_bytes, encrypt=options.encrypt), clock, times)
    try:
        tier.start()
    except BaseException:
        tier.close()
        raise
    return tier
