"""Durations of prompts, hand-offs and output tokens by worker, estimated from the gateway's own requests.

Observations of a kind are fitted online, by lines with exponential forgetting, for the whole fleet and for each worker.
A worker's own fit is used only if it differs clearly from the fleet's, as on different hardware; smaller differences
are noise, which would scatter equal prefixes over equal workers. Until the fleet has observations, defaults apply. The
first observation of each process is dropped: it contains compilation, page faults and connection set-up.

Commitments are work that this gateway has dispatched and that the workers' statuses do not show yet. A status is up to
half a second old; without its own count, a gateway would send every request of a burst to the worker that was least
loaded at the last status.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvferry.core.clock import Clock
from kvferry.core.ids import WorkerId

_DECAY = 0.98
"""Weight of the past at each observation: the last 50 observations dominate."""
_MIN_SPREAD = 0.05
"""Minimum standard deviation of the amounts, as a fraction of their mean, for a slope to be fitted."""
_OUTLIER = 8.0
"""A duration that differs from the fit by more than this factor is clamped to this factor: pauses of a
process (compilation, swapping) do not predict the duration of the next request."""
_NUM_TRUSTED = 5
"""Minimum number of observations before outliers are clamped."""
DEFAULT_PREFILL = (0.005, 5e-4)
"""Time to compute a prompt without any observation, in seconds: constant, per token."""
DEFAULT_STEP = (0.02, 6e-4)
"""Time per output token without any observation, in seconds: constant, per running sequence."""
DEFAULT_TRANSFER = (0.002, 1e-5)
"""Time of a hand-off without any observation, in seconds: constant, per token."""
DEFAULT_OUTPUT_TOKENS = 128.0
_NUM_OWN = 3
"""Minimum number of observations of a worker before its own fit may be used."""
_DIFFERENT = 0.15
"""Relative difference from the fleet's fit, at the mean of a worker's amounts, above which the worker's own fit is
used."""
_MAX_WORKERS = 4096
_MAX_PAIRS = 16384
_STEP_SLOPE = 0.05
"""Assumed share of the time per output token that is proportional to the running sequences, until loads differ."""
_EWMA = 0.02
Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class FittedLine:
    """Weighted least squares fit of seconds = intercept + slope * amount, both at least 0.

    As long as the amounts hardly differ, the slope is an assumption: `slope_share` of the mean duration per mean
    amount. 1 gives a line through the origin (work proportional to the amount), 0 a constant.
    """

    slope_share: float
    count: int = 0
    """Number of observations."""
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _line: tuple[float, float] | None = (0.0, 0.0)
    """The fitted line (constant, slope); `None` if there are observations that it does not include."""

    def add(self, amount: float, seconds: float) -> None:
        """Add an observation; one without an amount or with a negative duration is ignored.

        Args:
            amount: amount of work, for example a number of tokens.
            seconds: its duration.
        """
        if amount <= 0 or seconds < 0:
            return
        if self.count >= _NUM_TRUSTED:
            expected = self.predict(amount)
            seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER) if expected > 0 else seconds
        self.count += 1
        self._weight = self._weight * _DECAY + 1
        self._x = self._x * _DECAY + amount
        self._y = self._y * _DECAY + seconds
        self._xx = self._xx * _DECAY + amount * amount
        self._xy = self._xy * _DECAY + amount * seconds
        self._line = None

    def predict(self, amount: float) -> float:
        """Return the expected time for an amount in seconds, at least 0; 0 without observations.

        Args:
            amount: amount of work, in the unit of `add`.
        """
        intercept, slope = self.line()
        return intercept + slope * amount

    @property
    def mean_amount(self) -> float:
        """Mean of the amounts; 0 without observations."""
        return self._x / self._weight if self.count else 0.0

    def line(self) -> tuple[float, float]:
        """Return (intercept in seconds, slope in seconds per unit of the amount)."""
        if self._line is None:
            self._line = self._fit()
        return self._line

    def _fit(self) -> tuple[float, float]:
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        if variance <= (_MIN_SPREAD * x) ** 2:
            slope = self.slope_share * y / x
            return (1 - self.slope_share) * y, slope
        slope = (self._xy / self._weight - x * y) / variance
        if slope <= 0:
            return y, 0.0
        intercept = y - slope * x
        return (intercept, slope) if intercept >= 0 else (0.0, self._xy / self._xx)


@dataclass(frozen=True, slots=True)
class Process:
    """A run of a worker: durations of different incarnations are not compared."""

    worker: WorkerId
    incarnation: str


class _Fits(Generic[Key]):
    """Lines by key, with the line of all observations as a fallback; the least recently observed keys are dropped."""

    def __init__(self, slope_share: float, default: tuple[float, float], max_keys: int) -> None:
        self._slope_share = slope_share
        self._default = default
        self._max_keys = max_keys
        self._lines: OrderedDict[Key, FittedLine] = OrderedDict()
        self._all = FittedLine(slope_share)

    def add(self, key: Key, amount: float, seconds: float) -> None:
        line = self._lines.setdefault(key, FittedLine(self._slope_share))
        self._lines.move_to_end(key)
        line.add(amount, seconds)
        self._all.add(amount, seconds)
        if len(self._lines) > self._max_keys:
            self._lines.popitem(last=False)

    def line(self, *keys: Key) -> tuple[float, float]:
        """Return the line of the first key that has enough observations, or else of all observations, or else the
        default."""
        for key in keys:
            own = self._lines.get(key)
            if own is not None and own.count >= _NUM_OWN:
                return own.line() if self._differs(own) else self._all.line()
        return self._all.line() if self._all.count else self._default

    def _differs(self, own: FittedLine) -> bool:
        expected = self._all.predict(own.mean_amount)
        return abs(own.predict(own.mean_amount) - expected) > _DIFFERENT * expected


class Estimates:
    """The estimates of one gateway. Not thread-safe."""

    def __init__(self) -> None:
        self._prefills = _Fits[WorkerId](1.0, DEFAULT_PREFILL, _MAX_WORKERS)
        self._steps = _Fits[WorkerId](_STEP_SLOPE, DEFAULT_STEP, _MAX_WORKERS)
        self._transfers = _Fits[tuple[str, str]](1.0, DEFAULT_TRANSFER, _MAX_PAIRS)
        self._warm: OrderedDict[Hashable, None] = OrderedDict()
        self._output_tokens: float | None = None
        self._hit_share = 0.0

    # -- observations ------------------------------------------------------------------------------------------------

    def observe_prefill(self, process: Process, num_tokens: int, seconds: float) -> None:
        """Add the time in which a worker computed `num_tokens` tokens of a prompt, without its queue.

        Args:
            process: the run of the worker; its first observation is ignored.
            num_tokens: number of tokens that were computed.
            seconds: duration of the computation.
        """
        if self._is_warm(("prefill", process)):
            self._prefills.add(process.worker, num_tokens, seconds)

    def observe_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Add a prompt and the number of its tokens that were cached.

        Args:
            num_tokens: number of tokens of the prompt.
            num_cached: number of leading tokens that were cached.
        """
        if num_tokens > 0:
            self._hit_share += _EWMA * (min(1.0, num_cached / num_tokens) - self._hit_share)

    def observe_output(self, process: Process, running: float, num_tokens: int, seconds: float) -> None:
        """Add the mean step time of a finished output.

        Args:
            process: the worker's process that generated it.
            running: mean number of sequences that ran on the worker meanwhile.
            num_tokens: number of tokens after the first one; an output without any is not counted.
            seconds: time from the first to the last token, in seconds.
        """
        if self._is_warm(("output", process)) and num_tokens > 0:
            self._steps.add(process.worker, max(1.0, running), seconds / num_tokens)

    def observe_length(self, num_tokens: int) -> None:
        """Add the number of tokens of a finished output."""
        if self._output_tokens is None:
            self._output_tokens = float(num_tokens)
        self._output_tokens += _EWMA * (num_tokens - self._output_tokens)

    def observe_transfer(
        self, source: Process, target: Process, distance: str, num_tokens: int, seconds: float
    ) -> None:
        """Add a hand-off of KV between two workers.

        Args:
            source: the worker that has the KV.
            target: the worker that read it.
            distance: relation between the places of the two workers, for pairs without observations; see
                `replicas.Place`.
            num_tokens: number of tokens whose KV was read.
            seconds: duration of the hand-off, in seconds.
        """
        if self._is_warm(("transfer", source, target)):
            self._transfers.add((source.worker, target.worker), num_tokens, seconds)
            self._transfers.add(("distance", distance), num_tokens, seconds)

    def _is_warm(self, what: Hashable) -> bool:
        """Return whether this kind was observed before, and record that it has now been observed."""
        was_warm = what in self._warm
        self._warm[what] = None
        self._warm.move_to_end(what)
        if len(self._warm) > 2 * _MAX_WORKERS + _MAX_PAIRS:
            self._warm.popitem(last=False)
        return was_warm

    # -- predictions -------------------------------------------------------------------------------------------------

    def prefill_line(self, worker: WorkerId) -> tuple[float, float]:
        """Return the estimated time of a prompt on a worker in seconds: (constant, per computed token)."""
        return self._prefills.line(worker)

    def step_line(self, worker: WorkerId) -> tuple[float, float]:
        """Return the estimated time per output token of a sequence on a worker in seconds: (constant, per running
        sequence)."""
        return self._steps.line(worker)

    def transfer_line(self, source: WorkerId, target: WorkerId, distance: str) -> tuple[float, float]:
        """Return the estimated time of a hand-off between two workers in seconds: (constant, per token)."""
        return self._transfers.line((source, target), ("distance", distance))

    def output_tokens(self, max_tokens: int) -> float:
        """Return the expected number of output tokens of a request that allows `max_tokens`."""
        mean = DEFAULT_OUTPUT_TOKENS if self._output_tokens is None else self._output_tokens
        return min(float(max_tokens), mean) if max_tokens > 0 else mean

    @property
    def hit_share(self) -> float:
        """Fraction of prompt tokens that were recently found in caches, 0 to 1: the probability that a cached block is
        used again before it leaves the cache."""
        return self._hit_share


@dataclass(frozen=True, slots=True, eq=False)
class Commitment:
    """The work of one sample: a prompt on one worker, and blocks on the same or another one."""

    prompt_address: str = ""
    """Worker that computes the prompt; empty if none does."""
    prompt_tokens: int = 0
    """Number of tokens that it computes."""
    decode_address: str = ""
    """Worker that will generate; empty if it is not chosen yet, or once the prompt has arrived there."""
    decode_blocks: int = 0
    """Number of KV blocks that the sample will need there."""


@dataclass(slots=True)
class _Worker:
    prompts: OrderedDict[Commitment, int] = field(default_factory=OrderedDict)
    tokens: int = 0
    """Total number of tokens in `prompts`."""
    head_since: float = 0.0
    """Time at which the computation of the oldest prompt began."""
    sequences: int = 0
    blocks: int = 0


class Commitments:
    """The commitments of one gateway. Not thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self.count = 0
        """Number of commitments."""

    def add(self, commitment: Commitment) -> None:
        """Count a commitment until it is released."""
        self.count += 1
        if commitment.prompt_address:
            worker = self._workers.setdefault(commitment.prompt_address, _Worker())
            if not worker.prompts:
                worker.head_since = self._clock.monotonic()
            worker.prompts[commitment] = commitment.prompt_tokens
            worker.tokens += commitment.prompt_tokens
        if commitment.decode_address:
            worker = self._workers.setdefault(commitment.decode_address, _Worker())
            worker.sequences += 1
            worker.blocks += commitment.decode_blocks

    def release(self, commitment: Commitment) -> None:
        """Stop counting a commitment.

        Raises:
            KeyError: the commitment is not counted.
        """
        self.count -= 1
        if commitment.prompt_address:
            worker = self._workers[commitment.prompt_address]
            if next(iter(worker.prompts)) is commitment:
                worker.head_since = self._clock.monotonic()
            worker.tokens -= worker.prompts.pop(commitment)
            self._drop_if_empty(commitment.prompt_address)
        if commitment.decode_address:
            worker = self._workers[commitment.decode_address]
            worker.sequences -= 1
            worker.blocks -= commitment.decode_blocks
            self._drop_if_empty(commitment.decode_address)

    def prompt_tokens(self, address: str, seconds_per_token: float) -> float:
        """Return the number of tokens of dispatched prompts that the worker has not computed yet.

        Prompts are computed in the order of their dispatch; the progress of the oldest one follows from the time.

        Args:
            address: address of the worker.
            seconds_per_token: estimated time to compute one prompt token; 0 if unknown.
        """
        worker = self._workers.get(address)
        if worker is None or not worker.prompts:
            return 0.0
        head = next(iter(worker.prompts.values()))
        elapsed = self._clock.monotonic() - worker.head_since
        done = min(float(head), elapsed / seconds_per_token) if seconds_per_token > 0 else 0.0
        return worker.tokens - done

    def queued_tokens(self, address: str, seconds_per_token: float, *, reported: int, reported_at: float) -> float:
        """Return the number of prompt tokens that a worker has to compute before a new prompt.

        The larger of two counts: the prompts that this gateway has dispatched, and the tokens of the last status, which
        include other gateways' prompts, less what the worker has computed since then.

        Args:
            address: address of the worker.
            seconds_per_token: estimated time to compute one prompt token; 0 if unknown.
            reported: number of prompt tokens to compute, in the last status.
            reported_at: time of that status, in seconds of this object's clock.
        """
        age = self._clock.monotonic() - reported_at
        computed = age / seconds_per_token if seconds_per_token > 0 else 0.0
        return max(self.prompt_tokens(address, seconds_per_token), reported - computed)

    def sequences(self, address: str) -> int:
        """Return the number of sequences that will arrive at a worker."""
        worker = self._workers.get(address)
        return 0 if worker is None else worker.sequences

    def blocks(self, address: str) -> int:
        """Return the number of KV blocks that these sequences will need on a worker."""
        worker = self._workers.get(address)
        return 0 if worker is None else worker.blocks

    def _drop_if_empty(self, address: str) -> None:
        worker = self._workers.get(address)
        if worker is not None and not worker.prompts and not worker.sequences:
            del self._workers[address]
