"""Jobs of a replica, its settings and totals, and the interface through which it reports."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.core.ids import BlockHash, RequestId
from kvferry.core.settings.engine import EngineSettings, SchedulerLimits
from kvferry.engine.schedule.step.kv_jobs import Export
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.engine.schedule.step.sequence import Sequence as EngineSequence
from kvferry.kv.pricing.price import LoadPolicy
from kvferry.simulator.requests.tokens import Output


@dataclass(slots=True, eq=False)
class Job:
    """One sequence on one replica."""

    request_id: RequestId
    tokens: Sequence[int]
    """The prompt, then tokens generated earlier."""
    num_prompt: int
    output: Output
    arrived: float
    """Time of the request's arrival at the gateway, seconds."""
    names: list[BlockHash] = field(default_factory=list)
    """Names of leading blocks, if they are known."""
    tenant: str = ""
    priority: int = 0
    retain_seconds: float = 0.0
    """Time for which the prompt is to be kept in the cache; 0 for no retention."""
    exports: bool = False
    """Whether the job ends after one token, and its pages are offered."""
    remote: RemoteKv | None = None
    last: float | None = None
    """Time of the last token, seconds; `None` before the first."""
    gaps: "array[float] | None" = None
    """Times between tokens in seconds, if the request collects them."""
    started: float = 0.0
    """Time at which its computation on this replica began."""
    first: float | None = None
    """Time of the first token on this replica, seconds; `None` before it."""
    sequence: EngineSequence | None = None
    context: object = None
    """Arbitrary value for the listener."""


class Listener(Protocol):
    """Receives the events of jobs on replicas. A protocol, because a replica is below the fleet that listens to it, and
    also runs without one."""

    def first_token(self, job: Job, now: float) -> None:
        """Handle the first token of a request, on any replica.

        Args:
            job: the job that generated the token.
            now: virtual time in seconds.
        """
        ...

    def answered(self, job: Job, now: float) -> None:
        """Handle the first token of a job on this replica.

        Args:
            job: the job.
            now: virtual time in seconds.
        """
        ...

    def fetched(self, job: Job, num_blocks: int, seconds: float) -> None:
        """Handle the end of a fetch of the job's KV from another replica.

        Args:
            job: the job.
            num_blocks: number of blocks that were fetched.
            seconds: duration of the fetch.
        """
        ...

    def gap(self, seconds: float, weight: int) -> None:
        """Handle the time between two tokens, which is the same for `weight` sequences.

        Args:
            seconds: time between the two tokens.
            weight: number of sequences with this time.
        """
        ...

    def declined(self, job: Job) -> None:
        """Handle the decision to compute the KV of the job's ticket because that is faster than fetching it."""
        ...

    def finished(self, job: Job, now: float) -> None:
        """Handle the end of a job, which has all tokens.

        Args:
            job: the job.
            now: virtual time in seconds.
        """
        ...

    def exported(self, job: Job, export: Export, now: float) -> None:
        """Handle an export of the job's pages, which the listener must offer; it owns their references.

        Args:
            job: the job.
            export: the pages of its prompt.
            now: virtual time in seconds.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings of a replica's engine."""

    num_blocks: int
    block_tokens: int = 16
    block_bytes: int = 1
    limits: SchedulerLimits = SchedulerLimits()  # noqa: RUF009  frozen
    load_policy: LoadPolicy = LoadPolicy.PRICE
    retention_share: float = EngineSettings(model="").retention_share
    """Maximum share of the pages that retentions hold."""
    takes_runs: bool = True
    """Whether runs of decode steps are simulated at once (`decode_runs`)."""


@dataclass(slots=True)
class ReplicaCounts:
    """Totals of one replica."""

    steps: int = 0
    tokens: int = 0
    """Number of computed tokens."""
    sampled: int = 0
    retained: int = 0
    """Number of prompts whose retention was granted."""
    unretained: int = 0
    """Number of prompts whose retention was refused."""
    busy_seconds: float = 0.0
    page_seconds: float = 0.0
    """Sum over steps of the number of pages in use times the duration in seconds."""
    sequence_seconds: float = 0.0
    """Sum over steps of the number of sequences times the duration in seconds."""
