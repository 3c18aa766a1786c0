"""Load or recompute: what each way would cost in seconds, from what it cost before, and which is chosen.

    load       seconds = round trip + bytes / rate                 for each peer and each tier
    compute    seconds = per step + per token + per token x tokens before it    of this engine, under its present load

Both are fitted to what was measured lately (`rates`). The choice is by price alone: a prefix that comes in 2 ms is
loaded though it is short, one behind a slow link is computed though it is long, and of one that lies in several places
the head is loaded as far as that pays. A head can be loaded and the tail computed, never the other way about: a token's
keys and values depend on all tokens before it.

A way that keeps losing would never be measured again, so now and then it is taken all the same if it is not much worse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvferry.kv.rates import RecentFit

# Priors: a host that copies at 1 GB/s and computes 1000 tokens a second. Either is replaced by the first measurements.
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
    """Who decides."""

    PRICE = "price"
    """The cheaper way."""
    ALWAYS = "always"
    """Whatever can be loaded is: for tests, and for who knows better."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice with what it was made from; kept with the request, shown to whoever asks why."""

    source: str
    """Of the first piece at stake: a tier's name, or `peer` and its connector."""
    first_token: int
    num_tokens: int
    """Positions first_token .. first_token+num_tokens-1 could be loaded."""
    num_loaded: int
    """How many of them, from the first on, were chosen to be; 0: all are computed."""
    num_bytes: int
    """Of the chosen ones; if none, of all."""
    load_seconds: float
    """Expected, for the chosen ones; if none, for all."""
    compute_seconds: float
    """Expected, for the same ones."""
    is_forced: bool = False
    """By policy, or to measure again; not by price."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What can be loaded as one: a peer's offer, or one storage object."""

    source: str
    num_tokens: int
    num_bytes: int
    place: str = ""
    """Which one of the sources of this kind, if they differ: a peer's name."""


class PriceBook:
    """What loads and computation take on this worker. Owned by the engine's thread."""

    def __init__(self, policy: LoadPolicy = LoadPolicy.PRICE) -> None:
        self.policy = policy
        self._loads: dict[tuple[str, str], RecentFit] = {}
        """By source and place."""
        self._compute = RecentFit((_PRIOR_STEP_SECONDS, _PRIOR_SECONDS_PER_TOKEN, _PRIOR_SECONDS_PER_PAIR))
        self._losses: dict[str, int] = {}

    def observe_load(self, source: str, num_bytes: int, seconds: float, *, place: str = "") -> None:
        """A load that succeeded took this long, waiting for its turn included."""
        self._load_fit(source, place).observe((1.0, float(num_bytes)), seconds)

    def observe_compute(self, first_token: int, num_tokens: int, seconds: float) -> None:
        """A step computed positions first_token .. first_token+num_tokens-1 of one prompt, and took this long."""
        self._compute.observe(_compute_features(1, first_token, num_tokens), seconds)

    def load_seconds(self, pieces: Sequence[Piece]) -> float:
        """What loading these should take: one round trip for each source, and the bytes."""
        totals: dict[tuple[str, str], int] = {}
        for piece in pieces:
            key = piece.source, piece.place
            totals[key] = totals.get(key, 0) + piece.num_bytes
        return sum(self._load_fit(*key).seconds((1.0, float(size))) for key, size in totals.items())

    def compute_seconds(self, first_token: int, num_tokens: int) -> float:
        """What computing these positions adds. The step that computes the token after them runs in any case."""
        if num_tokens <= 0:
            return 0.0
        more_steps = -(-(num_tokens + 1) // _CHUNK_TOKENS) - 1
        return self._compute.seconds(_compute_features(more_steps, first_token, num_tokens))

    def decide(self, pieces: Sequence[Piece], first_token: int) -> Decision:
        """How many of the pieces, from the first on, to load; `first_token` is the first one's first position.

        Raises:
            ValueError: there are no pieces.
        """
        if not pieces:
            raise ValueError("nothing to decide: no pieces")
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

    def _is_due(self, decision: Decision) -> bool:
        """Whether a way that lost should be measured again."""
        lost = self._losses[decision.source] = self._losses.get(decision.source, 0) + 1
        return lost % _PROBE_EVERY == 0 and decision.load_seconds < _PROBE_WITHIN * decision.compute_seconds

    def _decision(self, pieces: Sequence[Piece], count: int, first_token: int, *, is_forced: bool = False) -> Decision:
        weighed = pieces[:count] if count else pieces
        tokens = sum(p.num_tokens for p in weighed)
        return Decision(
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
                self._loads.pop(next(iter(self._loads)))  # a peer that is back is learned anew
            fit = RecentFit((_PRIOR_TRIP_SECONDS, _PRIOR_SECONDS_PER_BYTE))
            self._loads[source, place] = fit
        return fit


def _compute_features(num_steps: int, first_token: int, num_tokens: int) -> tuple[float, float, float]:
    pairs = num_tokens * first_token + num_tokens * (num_tokens - 1) / 2  # (token, token before it), as attention has
    return float(num_steps), float(num_tokens), pairs
