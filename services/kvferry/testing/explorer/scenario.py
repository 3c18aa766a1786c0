"""What there is to do in a world, how small it is, and what the adversary may spend."""

from dataclasses import dataclass
from functools import lru_cache

from kvferry.kv.offers import OfferTimes
from kvferry.kv.ticket import digest_tokens
from kvferry.kv.transfers import TransferTimes

OFFER_TIMES = OfferTimes(offer_seconds=2.5, lease_seconds=3.0, quiesce_seconds=1.0, max_failures=3)
TRANSFER_TIMES = TransferTimes(control_seconds=2.0, least_seconds=8.0, stall_seconds=2.5, queue_seconds=5.0)
"""Short leases beside long transfers: renewals, losses of leases and reuse of pages all fit into one read. All are
sums of powers of two, so that equal states have equal times."""
SILENCE_SECONDS = 4.0
"""After which the gateway gives up calls to a worker that shows no sign of life."""
RETRY_SECONDS = 0.25
REQUEST_SECONDS = 40.0
"""No request may need so long; the longest way through every timer is half of it."""
MOMENT_SECONDS = 0.5
"""Time between two pages of a slow read, or more."""
FINGERPRINT = b"one layout"

LOSSES = frozenset({"drop", "delay", "crash", "freeze", "cut", "stall", "lose", "short"})
"""Faults after which pages may have to wait for a timer."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One prompt; a block holds one token, and the last token's block is left to compute."""

    tokens: tuple[int, ...]
    tenant: str = "a"
    path: str = "both"
    """`prefill`: done with its first token; `decode`: too short for a prefill worker; `both`: handed over."""

    @property
    def num_pages(self) -> int:
        return len(self.tokens)

    def content(self, position: int) -> tuple[object, ...]:
        """What the page of this position holds: KV depends on everything before it, and belongs to a tenant."""
        return (self.tenant, *self.tokens[: position + 1])


@dataclass(frozen=True, slots=True)
class Scenario:
    """A small world."""

    name: str
    about: str
    requests: tuple[RequestPlan, ...]
    faults: int
    """How many faults in one run."""
    kinds: frozenset[str]
    """Which faults: drop, dup, delay (messages); crash, freeze (processes; with `gateway`, only that one crashes);
    cut (a connection), cancel (by the client), stall (a read), lose, short (epochs), swap (tickets)."""
    prefill_pages: int = 2
    decode_pages: int = 4
    decoders: tuple[str, ...] = ("D0",)
    held: bool = True
    """Whether tickets come with an offer."""
    readers: int = 1
    slow: bool = False
    """Whether time may pass between two pages of a read at no cost."""
    local_pages: int = 0
    """Leading pages that a decode worker has already, so that only the rest is fetched."""
    is_large: bool = False
    """Too large for every state: random walks only."""
    connected: bool = True
    """Whether decode workers know the first life of the prefill worker already."""


@lru_cache(maxsize=64)
def digest_of(tokens: tuple[int, ...]) -> bytes:
    """`digest_tokens`, once for each text."""
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
    Scenario("messages", "control messages are lost, doubled, late", (_A,), 2, _CONTROL, connected=False),
    Scenario(
        "deaths",
        "two decode workers; processes die or freeze, connections break, the client leaves",
        (_A,),
        1,
        _PROCESSES,
        decoders=("D0", "D1"),
    ),
    Scenario("everything", "faults of every kind", (_A,), 1, _CONTROL | _PROCESSES | _READS, connected=False),
    Scenario("reuse", "a second tenant's prompt wants the same pages of P", (_A, _BRIEF), 1, _PROCESSES | {"drop"}),
    Scenario(
        "tight",
        "a second tenant's request wants the same pages of D",
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
        "tickets whose pages nobody holds: reused between any two pages of a read",
        (_A, _BRIEF),
        1,
        _READS | {"cancel", "stall", "crash"},
        held=False,
    ),
    Scenario(
        "reborn",
        "the peer comes back with other content in pages of the same numbers and epochs",
        (_A, _AGAIN),
        1,
        frozenset({"crash"}),
        held=False,
    ),
    Scenario(
        "slow",
        "a read so slow that its lease must be renewed again and again",
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
        "two tenants; one is handed the other's ticket",
        (_A, _B),
        1,
        frozenset({"swap"}),
        prefill_pages=4,
    ),
    Scenario(
        "crowd",
        "four requests, two of them over one prefix, in pools for half of them; random walks only",
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
    """The scenario of that name.

    Raises:
        KeyError: there is none.
    """
    for found in SCENARIOS:
        if found.name == name:
            return found
    raise KeyError(f"no scenario {name!r}; there are {', '.join(s.name for s in SCENARIOS)}")
