"""Work that this gateway has dispatched and that the workers' statuses do not show yet.

A status is up to half a second old; without its own count, a gateway would send every request of a burst to the worker
that was least loaded at the last status.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvferry.core.clock import Clock


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
