"""Scenarios: requests, sizes and permitted faults."""

from dataclasses import dataclass
from functools import lru_cache

from kvferry.kv.handoff.offers import OfferTimes
from kvferry.kv.handoff.transfers import TransferTimes
from kvferry.kv.interface.ticket import digest_tokens

OFFER_TIMES = OfferTimes(offer_seconds=2.5, lease_seconds=3.0, quiesce_seconds=1.0, max_failures=3)
TRANSFER_TIMES = TransferTimes(control_seconds=2.0, min_seconds=8.0, stall_seconds=2.5, queue_seconds=5.0)
"""Short leases and long transfers, such that a single read can include renewals, lost leases and reuse of pages. All
times in seconds are sums of powers of two, so that equal states have equal times."""
SILENCE_SECONDS = 4.0
"""Time in seconds after which the gateway abandons calls to a silent worker."""
RETRY_SECONDS = 0.25
REQUEST_SECONDS = 40.0
"""Time limit of a request in seconds; the longest path through all timers takes half as long."""
MOMENT_SECONDS = 0.5
"""Minimum time in seconds between two pages of a slow read."""
FINGERPRINT = b"one layout"

LOSSES = frozenset({"drop", "delay", "crash", "freeze", "cut", "stall", "lose", "short"})
"""Faults after which pages may stay in use until a timer expires."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A prompt. Each block has one token, and the block of the last token must be computed."""

    tokens: tuple[int, ...]
    tenant: str = "a"
    path: str = "both"
    """`prefill`: the request ends with the first token; `decode`: the prompt is too short for a prefill worker; `both`:
    the request uses a hand-off."""

    @property
    def num_pages(self) -> int:
        return len(self.tokens)

    def content(self, position: int) -> tuple[object, ...]:
        """Return the content of the page at `position`, which depends on the tenant and all tokens up to there."""
        return (self.tenant, *self.tokens[: position + 1])


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests, sizes and permitted faults of an explorer run."""

    name: str
    about: str
    requests: tuple[RequestPlan, ...]
    faults: int
    """Maximum number of faults per run."""
    kinds: frozenset[str]
    """Kinds of faults: drop, dup, delay (messages); crash, freeze (processes; `gateway` restricts crashes to the
    gateway); cut (a connection), cancel (by the client), stall (a read), flip (bits of a page), lose (the reply with
    epochs), short (the reply lacks one epoch), swap (two tickets)."""
    prefill_pages: int = 2
    decode_pages: int = 4
    decoders: tuple[str, ...] = ("D0",)
    digests: bool = False
    """Whether tickets contain digests of their pages."""
    held: bool = True
    """Whether tickets belong to an offer that pins their pages."""
    readers: int = 1
    slow: bool = False
    """Whether time may pass between two pages of a read without a fault."""
    local_pages: int = 0
    """Number of leading pages that the decode worker has cached; only the remaining pages are fetched."""
    is_large: bool = False
    """Whether the scenario is too large for an exhaustive search and is explored only by random walks."""
    connected: bool = True
    """Whether decode workers are initially connected to the prefill worker."""


@lru_cache(maxsize=64)
def page_digest(content: tuple[object, ...]) -> bytes:
    """Return the digest of a page with this content."""
    return repr(content).encode()


@lru_cache(maxsize=64)
def digest_of(tokens: tuple[int, ...]) -> bytes:
    """Return the result of `digest_tokens` from a cache."""
    return digest_tokens(tokens)


_A = RequestPlan((11, 12))
_B = RequestPlan((21, 22), "b")
_BRIEF = RequestPlan((21,), "b", "prefill")
_AGAIN = RequestPlan((21, 22), "b", "prefill")
_SHORT = RequestPlan((21, 22), "b", "decode")
_SHARED = RequestPlan((11, 13), "a", "prefill")
_LONG = RequestPlan((31, 32, 33))
_CONTROL = frozenset({"drop", "dup", "delay"})
_PROCESSES = frozenset({"crash", "freeze", "cut", "cancel", "stall"})
_READS = frozenset({"lose", "short"})

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("messages", "control messages are lost, duplicated or delayed", (_A,), 2, _CONTROL, connected=False),
    Scenario(
        "deaths",
        "two decode workers; processes crash or freeze, connections break, the client disconnects",
        (_A,),
        1,
        _PROCESSES,
        decoders=("D0", "D1"),
    ),
    Scenario("everything", "faults of every kind", (_A,), 1, _CONTROL | _PROCESSES | _READS, connected=False),
    Scenario("reuse", "a second tenant's prompt needs the same pages of P", (_A, _BRIEF), 1, _PROCESSES | {"drop"}),
    Scenario(
        "tight",
        "a second tenant's request needs the same pages of D",
        (_A, _SHORT),
        1,
        frozenset({"crash", "freeze", "cancel", "stall"}),
        decode_pages=2,
    ),
    Scenario(
        "prefix",
        "a second prompt shares the first page of P",
        (_A, _SHARED),
        1,
        frozenset({"drop", "crash", "cancel", "stall"}),
        prefill_pages=3,
        local_pages=1,
    ),
    Scenario(
        "cached",
        "tickets whose pages are not held: pages are reused between any two pages of a read",
        (_A, _BRIEF),
        1,
        _READS | {"cancel", "stall", "crash"},
        held=False,
    ),
    Scenario(
        "reborn",
        "the peer restarts with different content in pages with the same numbers and epochs",
        (_A, _AGAIN),
        1,
        frozenset({"crash"}),
        held=False,
    ),
    Scenario(
        "slow",
        "a read so slow that its lease must be renewed repeatedly",
        (_LONG,),
        1,
        _CONTROL,
        prefill_pages=3,
        decode_pages=6,
        slow=True,
    ),
    Scenario(
        "readers",
        "one ticket for two readers on two workers",
        (_A,),
        1,
        frozenset({"drop", "delay", "stall", "crash", "gateway"}),
        decoders=("D0", "D1"),
        readers=2,
    ),
    Scenario(
        "swapped",
        "two tenants; one gets the other's ticket",
        (_A, _B),
        1,
        frozenset({"swap"}),
        prefill_pages=4,
    ),
    Scenario(
        "corrupt",
        "a page is corrupted in transit, and tickets contain digests",
        (_A,),
        1,
        frozenset({"flip"}),
        digests=True,
    ),
    Scenario(
        "crowd",
        "four requests, two of them with a common prefix, in pools for half of them; random walks only",
        (_A, _B, RequestPlan((11, 13)), RequestPlan((41, 42, 43), "c")),
        6,
        _CONTROL | _PROCESSES | _READS | {"swap"},
        prefill_pages=4,
        decode_pages=4,
        decoders=("D0", "D1"),
        is_large=True,
    ),
)


def scenario(name: str) -> Scenario:
    """Return the scenario with this name.

    Raises:
        KeyError: the name is unknown.
    """
    for found in SCENARIOS:
        if found.name == name:
            return found
    raise KeyError(f"unknown scenario {name!r}; use one of {', '.join(s.name for s in SCENARIOS)}")
