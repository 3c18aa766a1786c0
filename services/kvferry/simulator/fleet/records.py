"""Dispatched work of a simulated gateway and its durations: the inputs of routing by estimated latency.

Follows the rules of `gateway.dispatch.route_selection`, which takes the same records from the answers of workers.
"""

import math
from collections.abc import Sequence

from kvferry.gateway.decide.estimates.estimates import Commitment, Commitments, Estimates
from kvferry.gateway.decide.routing.routes import Route
from kvferry.simulator.fleet.members import SimulatedMember
from kvferry.simulator.worker.jobs import Job


class Records:
    """Work that one simulated gateway has dispatched, and the durations that it has observed."""

    def __init__(self, estimates: Estimates, commitments: Commitments) -> None:
        self._estimates, self._commitments = estimates, commitments

    def dispatched(self, tokens: Sequence[int], max_tokens: int, route: Route, *, has_kv: bool) -> Commitment:
        """Count the work of a request on the workers of its route.

        Args:
            tokens: the prompt, and tokens generated so far.
            max_tokens: maximum number of further tokens.
            route: the chosen workers.
            has_kv: whether a prefill worker has computed the prompt.
        """
        computing = route.prefill or (None if has_kv else route.decode)
        decode = route.decode.replica
        new_tokens = len(tokens) - route.decode.cached.tokens + math.ceil(self._estimates.output_tokens(max_tokens))
        commitment = Commitment(
            prompt_address="" if computing is None else computing.replica.address,
            prompt_tokens=0 if computing is None else max(1, len(tokens) - computing.cached.tokens),
            decode_address=decode.address,
            decode_blocks=-(-new_tokens // decode.block_tokens),
        )
        self._commitments.add(commitment)
        return commitment

    def arrived(self, commitment: Commitment | None) -> None:
        """Stop counting the work of a request."""
        if commitment is not None:
            self._commitments.release(commitment)

    def prefilled(self, job: Job, member: SimulatedMember, now: float) -> None:
        """Record the computation of a prompt.

        Args:
            job: the job whose prompt was computed.
            member: the worker that computed it.
            now: virtual time in seconds.
        """
        num_cached = 0 if job.sequence is None else job.sequence.kv.account.num_cached
        self._estimates.observe_prompt(len(job.tokens), num_cached)
        self._estimates.observe_prefill(member.process, len(job.tokens) - num_cached, now - job.started)

    def handed_off(self, source: SimulatedMember, target: SimulatedMember, num_blocks: int, seconds: float) -> None:
        """Record a hand-off of KV.

        Args:
            source: the prefill worker.
            target: the decode worker.
            num_blocks: number of blocks that were read, in the target's block size.
            seconds: duration of the hand-off, in seconds.
        """
        num_tokens = num_blocks * target.candidate.block_tokens
        self._estimates.observe_transfer(source.process, target.process, "unknown", num_tokens, seconds)

    def generated(self, job: Job, member: SimulatedMember, running: int, num_output: int) -> None:
        """Record a finished output.

        Args:
            job: the job that generated it.
            member: the worker.
            running: number of requests on the worker when the output began.
            num_output: number of output tokens, over all workers of the request.
        """
        self._estimates.observe_length(num_output)
        if job.first is not None and job.last is not None and job.sequence is not None:
            num_tokens = job.sequence.num_tokens - len(job.tokens) - 1
            mean = (running + member.candidate.load) / 2
            self._estimates.observe_output(member.process, mean, num_tokens, job.last - job.first)
