"""The injected faults: affected stack, duration, expected behavior of requests, time limits."""

from dataclasses import dataclass

CONNECTORS = ("shm", "nixl", "tcp")
TIERS = ("redis", "dram + redis", "disk")
LINKS = ("tcp link",)
GROUPS = (*CONNECTORS, *TIERS, *LINKS)
"""All groups of cases; the cases of a group share one running stack."""

PEER_LOSS = "all succeed; KV fetched from it is recomputed"
DETOUR = "all succeed; its streams resume on the other decode worker"
RIGHT_OR_UNAVAILABLE = "success or `UNAVAILABLE`"
A_MISS = "all succeed; a miss, KV is recomputed"


@dataclass(frozen=True, slots=True)
class Case:
    """An injected fault and the expected behavior."""

    group: str
    """Name of the stack into which the fault is injected."""
    fault: str
    expected: str
    """Expected behavior of requests, for the docs; the tests check `may_fail` and `goes_on`."""
    seconds: float = 0.0
    """Minimum duration of the fault in seconds; 0 for an instantaneous fault such as a crash."""
    may_fail: bool = False
    """Whether requests may end with UNAVAILABLE. Other errors and wrong tokens are never permitted."""
    goes_on: bool = True
    """Whether requests that begin during the fault must succeed before it ends."""
    request_within: float = 60.0
    """Time limit in seconds of every request, successful or not; it only detects hangs."""
    normal_within: float = 60.0
    """Time limit in seconds from the end of the fault until the affected component is in use again."""

    @property
    def name(self) -> str:
        """Unique name of the case."""
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
    Case("shm", "the gateway is killed", "its streams end with `UNAVAILABLE`; later ones succeed", may_fail=True),
    Case("shm", "the gateway is frozen for 8 s", RIGHT_OR_UNAVAILABLE, seconds=8.0, may_fail=True, goes_on=False),
    _prefill_killed("nixl"),
    _prefill_frozen("nixl", 20.0),
    _decode_killed("tcp"),
    _prefill_frozen("tcp", 8.0),
    _decode_frozen("tcp", 8.0),
    *_of_redis("redis"),
    Case("redis", "Redis is restarted at once, empty", A_MISS),
    Case("redis", "bits of every stored value are flipped", f"{A_MISS}; the value is removed"),
    Case("redis", "Redis is out of memory and evicts nothing, 5 s", "all succeed; nothing is stored", seconds=5.0),
    *_of_redis("dram + redis"),
    Case("dram + redis", "bits are flipped on the way from Redis, 5 s", A_MISS, seconds=5.0),
    Case("disk", "the disk is full for 5 s", "all succeed; nothing is stored", seconds=5.0),
    Case("disk", "every file is cut", A_MISS),
    Case("disk", "bits of every file are flipped", f"{A_MISS}; the file is removed"),
    Case("disk", "the folder is gone for 5 s", "all succeed; nothing is stored or found", seconds=5.0),
    Case("disk", "the disk is read-only for 5 s", "all succeed; nothing is stored", seconds=5.0),
    Case(
        "tcp link",
        "P's link is 100 times slower",
        "all succeed; first tokens do not wait for the KV, which is recomputed",
        seconds=5.0,
    ),
    Case("tcp link", "P's link is down for 6 s", PEER_LOSS, seconds=6.0),
    Case("tcp link", "P's link loses every packet for 12 s", PEER_LOSS, seconds=12.0),
)


def of_groups(*groups: str) -> list[Case]:
    """Return all cases of these groups, in order."""
    return [case for case in CASES if case.group in groups]
