"""Load-or-recompute decision: estimates of the time to load and the time to compute a prefix, and the choice between
them.

    load       seconds = round trip + bytes / rate                 for each peer and each tier
    compute    seconds = per step + per token + per token x tokens before it    for this engine, under its present load

Both are fitted to recent measurements (`rates`). The choice depends only on the estimated times: a short prefix that
can be loaded in 2 ms is loaded, a long prefix behind a slow link is computed, and if a prefix is spread over several
sources, as many leading pieces are loaded as save time. The beginning of a prefix can be loaded and its end computed,
but not vice versa, since a token's keys and values depend on all tokens before it.

A source that is never chosen would never be measured again, so it is probed periodically if it is not much slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvferry.kv.pricing.rates import RecentFit

# Priors: a host that copies 1 GB/s and computes 1000 tokens per second. Measurements soon replace them.
_PRIOR_TRIP_SECONDS = 0.001
_PRIOR_SECONDS_PER_BYTE = 1e-9
_PRIOR_STEP_SECONDS = 0.005
_PRIOR_SECONDS_PER_TOKEN = 1e-3
_PRIOR_SECONDS_PER_PAIR = 1e-8

_CHUNK_TOKENS = 512
_MAX_PLACES = 1024
_PROBE_EVERY = 32
_PROBE_WITHIN = 4.0


class LoadPolicy(StrEnum):
    """Policy for choosing between loading and computing KV."""

    PRICE = "price"
    """Choose the faster of loading and computing, by estimate."""
    ALWAYS = "always"
    """Load all KV that can be loaded; for tests and experiments."""


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Load-or-recompute decision with its inputs; stored with the request and shown in its trace."""

    source: str
    """Source of the first piece: a tier's name, or `peer` and its connector."""
    first_token: int
    num_tokens: int
    """Number of positions that could be loaded, from `first_token` on."""
    num_loaded: int
    """Number of leading positions to load; 0 if all positions are computed."""
    num_bytes: int
    """Bytes of the positions to load or, if none is loaded, of all positions."""
    load_seconds: float
    """Estimated time to load these bytes, in seconds."""
    compute_seconds: float
    """Estimated time to compute the same positions, in seconds."""
    is_forced: bool = False
    """Whether the load was chosen by policy or as a probe, not by the estimate."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Smallest unit of a load: a peer's offer, or one storage object."""

    source: str
    num_tokens: int
    num_bytes: int
    place: str = ""
    """Instance of the source, such as a peer's worker id; empty for sources with one instance."""


class PriceBook:
    """Cost model of loading and computing on this worker. Owned by the engine's thread."""

    def __init__(self, policy: LoadPolicy = LoadPolicy.PRICE) -> None:
        self.policy = policy
        self._loads: dict[tuple[str, str], RecentFit] = {}
        """Fitted duration of loads, by source and instance."""
        self._compute = RecentFit((_PRIOR_STEP_SECONDS, _PRIOR_SECONDS_PER_TOKEN, _PRIOR_SECONDS_PER_PAIR))
        self._losses: dict[str, int] = {}

    def observe_load(self, source: str, num_bytes: int, seconds: float, *, place: str = "") -> None:
        """Record the duration of a successful load, including its time in queues.

        Args:
            source: kind of source, for example `peer` or a tier's name.
            num_bytes: number of loaded bytes.
            seconds: duration in seconds.
            place: instance of the source, which has a fit of its own; empty if there is only one.
        """
        self._load_fit(source, place).observe((1.0, float(num_bytes)), seconds)

    def observe_compute(self, first_token: int, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step with positions first_token .. first_token+num_tokens-1 of one prompt.

        Args:
            first_token: first position that was computed.
            num_tokens: number of positions.
            seconds: duration of the step.
        """
        self._compute.observe(_compute_features(1, first_token, num_tokens), seconds)

    def load_seconds(self, pieces: Sequence[Piece]) -> float:
        """Estimate the time to load pieces, in seconds: one round trip per source, plus the transfer time of the
        bytes."""
        totals: dict[tuple[str, str], int] = {}
        for piece in pieces:
            key = piece.source, piece.place
            totals[key] = totals.get(key, 0) + piece.num_bytes
        return sum(self._load_fit(*key).seconds((1.0, float(size))) for key, size in totals.items())

    def compute_seconds(self, first_token: int, num_tokens: int) -> float:
        """Estimate the additional time, in seconds, to compute positions first_token .. first_token+num_tokens-1. The
        step for the following token is not counted, since it always runs.

        Args:
            first_token: first position to compute; all positions before it have KV.
            num_tokens: number of positions.
        """
        if num_tokens <= 0:
            return 0.0
        more_steps = -(-(num_tokens + 1) // _CHUNK_TOKENS) - 1
        return self._compute.seconds(_compute_features(more_steps, first_token, num_tokens))

    def decide(self, pieces: Sequence[Piece], first_token: int) -> LoadDecision:
        """Decide how many leading pieces to load.

        Args:
            pieces: contiguous parts of the KV that can be loaded, in order of position.
            first_token: first position of the first piece.

        Raises:
            ValueError: `pieces` is empty.
        """
        if not pieces:
            raise ValueError("pieces is empty; pass at least one piece")
        if self.policy is LoadPolicy.ALWAYS:
            return self._decision(pieces, len(pieces), first_token, is_forced=True)
        best, best_gain = 0, 0.0
        tokens = 0
        for count in range(1, len(pieces) + 1):
            tokens += pieces[count - 1].num_tokens
            gain = self.compute_seconds(first_token, tokens) - self.load_seconds(pieces[:count])
            if gain > best_gain:
                best, best_gain = count, gain
        decision = self._decision(pieces, best, first_token)
        if best == 0 and self._is_due(decision):
            return self._decision(pieces, len(pieces), first_token, is_forced=True)
        return decision

    def _is_due(self, decision: LoadDecision) -> bool:
        """Return whether to probe a source by a load although the estimate favors computing."""
        lost = self._losses[decision.source] = self._losses.get(decision.source, 0) + 1
        return lost % _PROBE_EVERY == 0 and decision.load_seconds < _PROBE_WITHIN * decision.compute_seconds

    def _decision(
        self, pieces: Sequence[Piece], count: int, first_token: int, *, is_forced: bool = False
    ) -> LoadDecision:
        weighed = pieces[:count] if count else pieces
        tokens = sum(p.num_tokens for p in weighed)
        return LoadDecision(
            source=pieces[0].source,
            first_token=first_token,
            num_tokens=sum(p.num_tokens for p in pieces),
            num_loaded=tokens if count else 0,
            num_bytes=sum(p.num_bytes for p in weighed),
            load_seconds=self.load_seconds(weighed),
            compute_seconds=self.compute_seconds(first_token, tokens),
            is_forced=is_forced,
        )

    def _load_fit(self, source: str, place: str) -> RecentFit:
        fit = self._loads.get((source, place))
        if fit is None:
            if len(self._loads) >= _MAX_PLACES:
                self._loads.pop(next(iter(self._loads)))  # a later fit of this source starts from the prior
            fit = RecentFit((_PRIOR_TRIP_SECONDS, _PRIOR_SECONDS_PER_BYTE))
            self._loads[source, place] = fit
        return fit


def _compute_features(num_steps: int, first_token: int, num_tokens: int) -> tuple[float, float, float]:
    pairs = num_tokens * first_token + num_tokens * (num_tokens - 1) / 2  # (token, earlier token), as in attention
    return float(num_steps), float(num_tokens), pairs
