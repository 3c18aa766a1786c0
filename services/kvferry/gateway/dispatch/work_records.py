"""Records the work dispatched to the workers, and its durations: the inputs of routing by estimated latency."""

import math

from kvferry.gateway.decide.estimates.commitments import Commitment, Commitments
from kvferry.gateway.decide.estimates.estimates import Estimates, Process
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.decide.routing.routes import Route
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.fleet.member import WorkerView
from kvferry.v1 import decode_pb2


class WorkRecords:
    """Dispatched work and observed durations of one gateway. Used on the event loop's thread only."""

    def __init__(self, fleet: Fleet, estimates: Estimates, commitments: Commitments) -> None:
        self._fleet = fleet
        self._estimates = estimates
        self._commitments = commitments

    # -- dispatched work ---------------------------------------------------------------------------------------------

    def dispatched(self, run: SampleRun, route: Route) -> None:
        """Count the sample's work on the workers of its route, replacing an earlier route.

        Args:
            run: the sample, whose commitment is set.
            route: its route.
        """
        self.arrived(run)
        computing = route.prefill or (route.decode if run.ticket is None else None)
        decode = route.decode.replica
        new_tokens = len(run.token_ids) - route.decode.cached.tokens
        if run.pooling is None:
            new_tokens += math.ceil(self._estimates.output_tokens(run.max_new_tokens))
        run.commitment = Commitment(
            prompt_address="" if computing is None else computing.replica.address,
            prompt_tokens=0 if computing is None else max(1, len(run.token_ids) - computing.cached.tokens),
            decode_address="" if run.pooling is not None else decode.address,
            decode_blocks=-(-new_tokens // decode.block_tokens),
        )
        self._commitments.add(run.commitment)

    def arrived(self, run: SampleRun) -> None:
        """Stop counting the sample's work: it is in its worker's status, or the sample has ended. Idempotent."""
        if run.commitment is not None:
            self._commitments.release(run.commitment)
            run.commitment = None

    # -- durations ---------------------------------------------------------------------------------------------------

    def prefilled(self, run: SampleRun, address: str, num_cached: int, seconds: float) -> None:
        """Record the computation of a prompt, or of the tokens so far.

        Args:
            run: the sample.
            address: address of the worker that computed it.
            num_cached: number of tokens whose KV was cached.
            seconds: time of the computation in seconds.
        """
        num_tokens = len(run.token_ids)
        if not run.is_step:  # nearly all tokens of a step are cached, unlike those of clients' prompts
            self._estimates.observe_prompt(num_tokens, num_cached)
        process = _process(self._fleet.view(address))
        if process is not None:
            self._estimates.observe_prefill(process, num_tokens - num_cached, seconds)

    def handed_off(self, run: SampleRun, source: str, target: str, handoff: decode_pb2.Handoff) -> None:
        """Record the duration of a hand-off.

        Args:
            run: the sample.
            source: address of the prefill worker.
            target: address of the decode worker.
            handoff: the decode worker's report.
        """
        views = self._fleet.view(source), self._fleet.view(target)
        processes = _process(views[0]), _process(views[1])
        if views[0] is None or views[1] is None or processes[0] is None or processes[1] is None:
            return
        num_tokens = handoff.num_blocks * views[1].block_tokens
        distance = views[0].place.distance(views[1].place)
        self._estimates.observe_transfer(processes[0], processes[1], distance, num_tokens, handoff.seconds)

    def generated(self, run: SampleRun, address: str, running: int, num_tokens: int, seconds: float) -> None:
        """Record a finished output.

        Args:
            run: the sample.
            address: address of the worker.
            running: number of requests on the worker when the output began.
            num_tokens: number of tokens after the first one on this worker.
            seconds: time between the first and the last token on this worker.
        """
        if not run.is_step:
            self._estimates.observe_length(len(run.emitted))
        view = self._fleet.view(address)
        process = _process(view)
        if view is not None and process is not None:
            mean = (running + self.running(address)) / 2
            self._estimates.observe_output(process, mean, num_tokens, seconds)

    def running(self, address: str) -> int:
        """Return the number of requests on a worker."""
        view = self._fleet.view(address)
        return 0 if view is None else view.as_replica().load


def _process(view: WorkerView | None) -> Process | None:
    if view is None or view.worker_id is None or view.incarnation is None:
        return None
    return Process(view.worker_id, view.incarnation)
