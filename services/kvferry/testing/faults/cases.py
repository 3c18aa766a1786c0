"""The faults as data: what happens, where, what is expected of every request, and within which bounds."""

from dataclasses import dataclass

CONNECTORS = ("shm", "nixl", "tcp")
TIERS = ("redis", "dram + redis", "disk")
LINKS = ("tcp link",)
GROUPS = (*CONNECTORS, *TIERS, *LINKS)
"""Each group's cases share one running stack."""

PEER_LOSS = "all right; what was fetched from it is computed again"
DETOUR = "all right; its streams go on at the other decode worker"
RIGHT_OR_UNAVAILABLE = "right, or `UNAVAILABLE`"
A_MISS = "all right; a miss, computed again"


@dataclass(frozen=True, slots=True)
class Case:
    """One fault."""

    group: str
    """Which stack it happens to."""
    fault: str
    expected: str
    """Of the requests, in words; `may_fail` and `goes_on` are what is checked."""
    seconds: float = 0.0
    """How long it lasts at least; 0: it is over at once, as a crash is."""
    may_fail: bool = False
    """Whether requests may end with UNAVAILABLE. Never with another error, and never with a wrong token."""
    goes_on: bool = True
    """Requests that begin during the fault must end right before it is over."""
    request_within: float = 60.0
    """Seconds that no request may exceed, however it ends. A bound on hanging, not on speed."""
    normal_within: float = 60.0
    """Seconds after the fault by which the service must use again what was missing."""

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.group}: {self.fault}"


def _prefill_killed(connector: str) -> Case:
    return Case(connector, "P is killed", PEER_LOSS)


def _decode_killed(connector: str) -> Case:
    return Case(connector, "a D of two is killed", DETOUR)


def _prefill_frozen(connector: str, seconds: float) -> Case:
    return Case(connector, f"P is frozen for {seconds:.0f} s", PEER_LOSS, seconds=seconds)


def _decode_frozen(connector: str, seconds: float) -> Case:
    return Case(connector, f"a D of two is frozen for {seconds:.0f} s", DETOUR, seconds=seconds)


def _of_redis(tiers: str) -> tuple[Case, ...]:
    return (
        Case(tiers, "Redis is killed, and back after 5 s, empty", A_MISS, seconds=5.0),
        Case(tiers, "Redis is frozen for 8 s", A_MISS, seconds=8.0),
    )


CASES: tuple[Case, ...] = (
    _prefill_killed("shm"),
    _decode_killed("shm"),
    _prefill_frozen("shm", 8.0),
    _decode_frozen("shm", 20.0),
    Case("shm", "both D are frozen for 8 s", RIGHT_OR_UNAVAILABLE, seconds=8.0, may_fail=True, goes_on=False),
    Case("shm", "P and both D are killed at once", RIGHT_OR_UNAVAILABLE, may_fail=True),
    Case("shm", "P is killed while 50 streams are cancelled", PEER_LOSS),
    Case("shm", "the gateway is killed", "its streams end with `UNAVAILABLE`; then all right", may_fail=True),
    Case("shm", "the gateway is frozen for 8 s", RIGHT_OR_UNAVAILABLE, seconds=8.0, may_fail=True, goes_on=False),
    _prefill_killed("nixl"),
    _prefill_frozen("nixl", 20.0),
    _decode_killed("tcp"),
    _prefill_frozen("tcp", 8.0),
    _decode_frozen("tcp", 8.0),
    *_of_redis("redis"),
    Case("redis", "Redis is restarted at once, empty", A_MISS),
    Case("redis", "bits of every stored value are flipped", f"{A_MISS}; the value is removed"),
    Case("redis", "Redis is out of memory and evicts nothing, 5 s", "all right; nothing is stored", seconds=5.0),
    *_of_redis("dram + redis"),
    Case("dram + redis", "bits are flipped on the way from Redis, 5 s", A_MISS, seconds=5.0),
    Case("disk", "the disk is full for 5 s", "all right; nothing is stored", seconds=5.0),
    Case("disk", "every file is cut", A_MISS),
    Case("disk", "bits of every file are flipped", f"{A_MISS}; the file is removed"),
    Case("disk", "the folder is gone for 5 s", "all right; nothing is stored or found", seconds=5.0),
    Case("disk", "the disk is read-only for 5 s", "all right; nothing is stored", seconds=5.0),
    Case(
        "tcp link",
        "P's link is 100 times slower",
        "all right; first tokens do not wait for the KV, which is computed again",
        seconds=5.0,
    ),
    Case("tcp link", "P's link is down for 6 s", PEER_LOSS, seconds=6.0),
    Case("tcp link", "P's link loses every packet for 12 s", PEER_LOSS, seconds=12.0),
)


def of_groups(*groups: str) -> list[Case]:
    """The cases of these groups, in order."""
    return [case for case in CASES if case.group in groups]
