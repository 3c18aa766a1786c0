"""Builds the gRPC requests that the dispatcher sends to workers for a sample."""

from dataclasses import replace

from kvferry.core.ids import new_ticket_id
from kvferry.core.inference.pooling import PoolingParams
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.rpc import wire, worker_wire
from kvferry.rpc.wire import pooling_to_wire
from kvferry.v1 import decode_pb2, prefill_pb2


def prefill_request(run: SampleRun, prior_turn_ticket: bytes) -> prefill_pb2.PrefillRequest:
    """Build the `Prefill.Run` request: compute the prompt, sample the first token and offer the blocks under a new
    ticket id.

    Args:
        run: the sample.
        prior_turn_ticket: sealed ticket for the blocks of a prior turn; empty if there is no such ticket.
    """
    request = run.request
    return prefill_pb2.PrefillRequest(
        request_id=request.caller.request_id,
        token_ids=request.token_ids,
        sampling=wire.sampling_to_wire(request.sampling),
        sample_index=request.sample_index,
        scope=request.caller.scope,
        offer=True,
        ticket_id=new_ticket_id(),
        prior_turn_ticket=prior_turn_ticket,
        priority=request.caller.priority,
        adapter=worker_wire.adapter_to_wire(request.caller.adapter),
    )


def pool_request(run: SampleRun, params: PoolingParams) -> prefill_pb2.PoolRequest:
    """Build the `Prefill.Pool` request: compute the prompt and its vector.

    Args:
        run: the sample, whose prompt is pooled.
        params: parameters of the vector.
    """
    request = run.request
    return prefill_pb2.PoolRequest(
        request_id=request.caller.request_id,
        token_ids=request.token_ids,
        pooling=pooling_to_wire(params),
        scope=request.caller.scope,
        priority=request.caller.priority,
        input_index=request.sample_index,
    )


def decode_request(run: SampleRun) -> decode_pb2.DecodeRequest:
    """Build the `Decode.Run` request: continue from the prompt and the emitted tokens, and return a ticket for the
    cached blocks."""
    request = run.request
    # The log-probabilities of the prompt arrive with the first token.
    sampling = replace(request.sampling, prompt_logprobs=None) if run.emitted else request.sampling
    return decode_pb2.DecodeRequest(
        request_id=request.caller.request_id,
        token_ids=run.token_ids,
        num_generated=len(run.emitted),
        sampling=wire.sampling_to_wire(sampling),
        sample_index=request.sample_index,
        scope=request.caller.scope,
        want_cached_ticket=True,
        priority=request.caller.priority,
        adapter=worker_wire.adapter_to_wire(request.caller.adapter),
    )
