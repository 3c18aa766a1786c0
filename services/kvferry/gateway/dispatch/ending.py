"""Ends a sample on every path: releases its ticket, records its timing and usage."""

from kvferry.core.clock import Clock
from kvferry.core.inference.chunks import Usage
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.decide.lifecycle.sample_states import DUTIES, MACHINE, Duty, SampleEvent
from kvferry.gateway.dispatch.releases import Releases
from kvferry.gateway.observe.instruments import GatewayInstruments


class Ending:
    """Ends the samples of one gateway. Used on the event loop's thread only."""

    def __init__(self, releases: Releases, clock: Clock, instruments: GatewayInstruments) -> None:
        self._releases = releases
        self._clock = clock
        self._instruments = instruments

    def drop_ticket(self, run: SampleRun, reason: str) -> None:
        """Release the sample's ticket, if it has one; the sample continues without a ticket.

        Args:
            run: the sample.
            reason: reason that the prefill worker records.
        """
        if run.ticket is not None:
            self._releases.release(run.ticket, run.request.caller.request_id, reason)
            run.ticket = None
            run.on(SampleEvent.DROP)

    def end(self, run: SampleRun, event: SampleEvent) -> None:
        """Enter a final state and run the `DUTIES` of the previous state; no effect if the sample has already ended.

        Args:
            run: the sample.
            event: an event that leads to a final state.
        """
        if run.state in MACHINE.final:
            return
        duties = DUTIES[run.state]
        run.on(event)
        for duty in duties:
            # `WorkerCalls` has already cancelled the sample's calls.
            if duty is Duty.RELEASE_TICKET and run.ticket is not None:
                reason = "client_gone" if event is SampleEvent.CANCEL else event.value
                self._releases.release(run.ticket, run.request.caller.request_id, reason)
                run.ticket = None
        usage = Usage(
            len(run.request.token_ids),
            run.num_output,
            run.num_cached_tokens,
            cache_write_tokens=run.num_written_tokens,
            loaded_tokens=run.num_loaded_tokens,
        )
        run.time(total_seconds=self._clock.monotonic() - run.request.caller.arrived)
        if not run.num_beams:  # those of a search are counted with its steps
            self._instruments.kv_reported(run.timing.kv)
        if not run.is_step:
            self._instruments.resumes.inc(run.timing.resumed)
            if run.num_beams and usage.output_tokens:  # the steps of a search count none
                self._instruments.tokens_arrived(usage.output_tokens, run.timing.first_token_seconds)
                self._instruments.ledger.row(*run.account).output_tokens += usage.output_tokens
            self._instruments.stream_ended(run.state.value, usage, run.timing)
