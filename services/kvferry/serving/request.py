"""A request from the edge to the workers: who sent it and under which limits, its prompt, and how it is sampled.

An edge (HTTP, gRPC, the offline API) creates one `Caller` and one `Request` for each prompt. All layers below pass them
on unchanged: text serving, admission, routing, and the source of the tokens.
"""

import ipaddress
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from kvferry.core.hashing import cache_scope
from kvferry.core.ids import AdapterId, RequestId
from kvferry.core.inference.beams import BeamParams
from kvferry.core.retention import NO_HINTS, CacheHints
from kvferry.core.sampling import SamplingParams
from kvferry.text.answers.answer import SplitOptions

EXPLAIN_HEADER = "x-kvferry-explain"
"""Header or gRPC metadata, any value, that asks for the choices of the routing policies that are not in use; see
`kvferry explain`."""


_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""Addresses of IPv4 behind NAT64 (RFC 6052)."""
_SUBNET_BITS = 64
"""Length of the prefix that one user of IPv6 usually has."""


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """Who sent a request, for fairness in work that needs no worker."""

    tenant: str = ""
    """Tenant of the client; empty for the default tenant."""
    address: str = ""
    """Host of the client; empty if unknown."""

    @property
    def owner(self) -> str:
        """Owner of the client's jobs: its tenant, or its host if it has none. A host of IPv6 stands for its /64."""
        return self.tenant or f"address {_subnet(self.address)}"


def _subnet(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:  # how a listener for both versions writes IPv4
        return str(parsed.ipv4_mapped)
    if not parsed.is_global or parsed in _TRANSLATED:
        return address
    return str(ipaddress.IPv6Network((int(parsed), _SUBNET_BITS), strict=False))


@dataclass(frozen=True, slots=True)
class Caller:
    """Identity of a request, and its limits."""

    request_id: RequestId
    """Request id, shared by all samples of a request."""
    tenant: str = ""
    """Tenant that sent the request; empty for the default tenant."""
    cache_salt: str = ""
    """Requests of the tenant with unequal salts share no KV; empty for the tenant's own cache."""
    adapter: AdapterId | None = None
    """Version of the adapter to compute with; `None` for the base model."""
    priority: int = 0
    """Priority of the request, used if workers schedule by priority; lower numbers come first."""
    arrived: float = 0.0
    """Arrival time, monotonic seconds; timings are relative to it."""
    deadline: float | None = None
    """Deadline, monotonic seconds; `None` selects the source's default limit."""
    queued_seconds: float = 0.0
    """Seconds that the request has waited for its admission."""
    is_explained: bool = False
    """Whether the choices of the routing policies that are not in use are recorded too."""
    is_batch_line: bool = False
    """Whether the request is a line of a batch, which gets the lowest priority, whatever `priority` is."""
    address: str = ""
    """Host of the client; empty if unknown."""
    hints: CacheHints = NO_HINTS
    """What the client asks of the cache."""
    scope: str = field(init=False)
    """Scope of the request's block names: tenant, salt and adapter."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "scope", cache_scope(self.tenant, self.cache_salt, self.adapter))

    @property
    def client(self) -> ClientIdentity:
        """The client that sent the request."""
        return ClientIdentity(self.tenant, self.address)


@dataclass(frozen=True, slots=True)
class BeamRound:
    """Results of one round of a beam search, besides a token of each beam."""

    num_cached: int
    """Number of tokens of the prompt whose KV was cached in the first round."""
    num_recomputed: int
    """Number of tokens of beams whose KV was computed again, since their block was not full; 0 in the first round."""


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request for the samples of one prompt (`serving.prompts`)."""

    caller: Caller
    token_ids: Sequence[int]
    """Token ids of the prompt, at least one; never modified."""
    sampling: SamplingParams
    """Sampling parameters with `max_tokens` and `seed` set."""
    sample_index: int = 0
    """Index of the sample, for sources, which generate one sample at a time."""
    num_samples: int = 1
    """Number of samples, or of outputs of a beam search."""
    split: SplitOptions | None = None
    """Options for splitting the answers; `None` returns all of their text unchanged."""
    beams: BeamParams | None = None
    """Parameters of a beam search, whose best `num_samples` outputs are returned; `None` for sampling."""
    held_bytes: int = 0
    """Memory that the request holds while it waits for its admission, besides its tokens, in bytes."""
    on_round: Callable[[BeamRound], None] = lambda _: None
    """Called after each round of a beam search."""
    prior_ids: Sequence[int] = ()
    """Tokens that an earlier stream of this request has generated. The gateway's source continues after them and yields
    later ones only; other sources are given none."""
    sample_slot: Callable[[int], AbstractAsyncContextManager[None]] | None = None
    """Returns a context in which the sample with this index has a slot; `None` if the request has one sample."""

    @property
    def retain_seconds(self) -> float:
        """Time for which this sample's worker is asked to keep the prompt; 0 except for the first sample."""
        return 0.0 if self.sample_index else self.caller.hints.retain_seconds

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are computed: samples, or beams."""
        return self.num_samples if self.beams is None else self.beams.width
