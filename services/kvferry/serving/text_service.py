"""Text serving, independent of a protocol: limits and tenants, and the conversion of a token stream to text chunks.

TokenSource --TokenEvent--> detokenizer --text--> stop strings --text--> answer splitter --TextChunk--> gRPC, HTTP
                 ^                                    |                        |
                 +------- closed on a match, or after the last call to report

Only answers that may contain reasoning or tool calls have a splitter.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import InvalidRequest, InvariantBroken, Overloaded
from kvferry.core.ids import AdapterId
from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.chunks import StopReason, TextChunk, Usage
from kvferry.core.sampling import FinishReason, SampledToken
from kvferry.core.traces.spans import Tracer, current_span
from kvferry.serving import beam_search, prompts
from kvferry.serving.admission import RequestAdmission, RequestSize, Slot
from kvferry.serving.constraint_check import ConstraintCheck
from kvferry.serving.merging import merge
from kvferry.serving.request import BeamRound, ClientIdentity, Request
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_process import TextProcess
from kvferry.serving.token_source import SearchSource, TokenEvent, TokenSource, VectorSource
from kvferry.text.answers.answer import AnswerSplitter, SplitOptions
from kvferry.text.answers.pieces import AnswerParts
from kvferry.text.requests.beams import check_beam_sampling
from kvferry.text.requests.output_text import OutputText
from kvferry.text.requests.prompt_parameters import check_prompt_logprobs, kept_prompt

MAX_RUNNING_SAMPLES = 16
"""Maximum number of concurrent samples of a request, so that the request does not delay others."""
P = ParamSpec("P")
R = TypeVar("R")
LARGE_CHARS = 16_384
"""Minimum number of characters of text that is read in the text process; reading so much text takes milliseconds."""


async def generate_text(
    source: TokenSource, model: TextModel, request: Request, clock: Clock, searches: SearchSource | None = None
) -> AsyncGenerator[TextChunk, None]:
    """Generate all samples of `request`; their chunks are interleaved, each sample's chunks are in order.

    Close the generator (`contextlib.aclosing`) to stop early; this also stops the generation of every sample.

    Args:
        source: generates the tokens of a sample.
        model: tokenizer and limits.
        request: the request: prompt, sampling parameters and number of samples.
        clock: clock of the timing.
        searches: computes the steps of beam searches; with `None`, each step is a stream of `source`.

    Raises:
        KvferryError: the source failed; the other samples are stopped.
    """
    if request.beams is not None:
        with nullcontext(source) if searches is None else searches.search(request, request.beams.width) as steps:
            outputs = await _beams(steps, model, request, request.beams, clock)
        for chunk in outputs:
            yield chunk
        return
    if request.num_samples == 1:
        async with aclosing(_sample(source, model, request, 0, clock)) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    samples = [_sample(source, model, request, index, clock) for index in range(request.num_samples)]
    async with aclosing(merge(samples, at_once=MAX_RUNNING_SAMPLES)) as chunks:
        async for chunk in chunks:
            yield chunk


async def _beams(
    source: TokenSource, model: TextModel, request: Request, params: BeamParams, clock: Clock
) -> list[TextChunk]:
    """Return the best outputs of a beam search, each as one chunk; the sample's index is its rank."""
    sampling = request.sampling
    found = await beam_search.search(source, request, params, model.eos_token_ids)
    timing = replace(found.timing, total_seconds=clock.monotonic() - request.caller.arrived)
    marks = {} if request.split is None else model.answer_form.marks.by_token
    chunks: list[TextChunk] = []
    num_returned = 0
    for index, beam in enumerate(found.beams[: request.num_samples]):
        writer = OutputText(sampling, model.new_detokenizer(not sampling.skip_special_tokens, marks), None)
        splitter = None if request.split is None else AnswerSplitter(model.answer_form, request.split)
        event = TokenEvent(tuple(map(SampledToken, beam.tokens)), beam.finish_reason)
        parts, kept, finish, _, num_reasoning = _added(event, writer, splitter, request.split)
        usage = Usage(
            len(request.token_ids),
            len(kept),
            found.num_cached_tokens,
            reasoning_tokens=num_reasoning,
            cache_write_tokens=found.num_written_tokens,
        )
        num_returned += len(kept)
        chunks.append(
            TextChunk(
                index, parts.content, kept, finish, usage, timing, reasoning=parts.reasoning, tool_calls=parts.calls
            )
        )
    best = chunks[0]
    assert best.usage is not None, "an output has its usage"
    chunks[0] = replace(best, usage=replace(best.usage, unreturned_tokens=found.num_tokens - num_returned))
    return chunks


def _sample(
    source: TokenSource, model: TextModel, request: Request, index: int, clock: Clock
) -> AsyncGenerator[TextChunk, None]:
    """Return the chunks of one sample, which waits for its slot if the request has several."""
    chunks = _sample_now(source, model, request, index, clock)
    return chunks if request.sample_slot is None else _in_slot(request.sample_slot(index), chunks)


async def _in_slot(
    slot: AbstractAsyncContextManager[None], chunks: AsyncGenerator[TextChunk, None]
) -> AsyncGenerator[TextChunk, None]:
    async with aclosing(chunks), slot:
        async for chunk in chunks:
            yield chunk


async def _sample_now(
    source: TokenSource, model: TextModel, request: Request, index: int, clock: Clock
) -> AsyncGenerator[TextChunk, None]:
    one = request if index == request.sample_index else replace(request, sample_index=index)
    sampling, form = request.sampling, model.answer_form
    stops = model.new_stop_matcher(sampling.stop) if sampling.stop else None
    marks = {} if request.split is None else form.marks.by_token
    writer = OutputText(sampling, model.new_detokenizer(not sampling.skip_special_tokens, marks), stops)
    splitter = None if request.split is None else AnswerSplitter(form, request.split)
    num_output = num_reasoning = 0
    async with aclosing(source.stream(one)) as events:
        async for event in events:
            parts, kept, finish, stop_reason, reasoned = _added(event, writer, splitter, request.split)
            num_output += len(kept)
            num_reasoning += reasoned
            chunk = TextChunk(
                index,
                parts.content,
                kept,
                finish,
                prompt_logprobs=event.prompt_logprobs,
                reasoning=parts.reasoning,
                tool_calls=parts.calls,
            )
            if finish is None:
                yield chunk
                continue
            usage = Usage(
                len(request.token_ids),
                num_output,
                event.num_cached_tokens,
                reasoning_tokens=num_reasoning,
                cache_write_tokens=event.num_written_tokens,
            )
            timing = replace(event.timing, total_seconds=clock.monotonic() - request.caller.arrived)
            yield replace(chunk, usage=usage, timing=timing, stop_reason=stop_reason)
            return
    raise InvariantBroken(
        f"a token stream of {request.caller.request_id} ended after {num_output} tokens without a reason"
    )


def _added(
    event: TokenEvent, writer: OutputText, splitter: AnswerSplitter | None, split: SplitOptions | None
) -> tuple[AnswerParts, tuple[SampledToken, ...], FinishReason | None, StopReason, int]:
    """Return the parts of the text that an event adds, its tokens up to the end of the sample, the reasons if the
    sample has ended, and the number of its tokens that are inside the reasoning, begin it or end it."""
    if splitter is None:
        text, kept, finish, stop_reason = writer.add(event.tokens, event.finish_reason)
        return AnswerParts(text), kept, finish, stop_reason, 0
    parts, kept, stop_reason = AnswerParts(""), (), None
    finish = None
    num_reasoning = 0
    is_each_split = splitter.may_reason or (writer.has_stop_strings and splitter.may_exempt)
    for group in _groups(event.tokens, split, is_each_split=is_each_split):
        was_reasoning = splitter.is_reasoning
        is_last = len(kept) + len(group) == len(event.tokens)
        ended = event.finish_reason if is_last else None
        text, added, finish, stop_reason = writer.add(group, ended, splitter.may_stop)
        kept += added
        more, finish = _split(splitter, text, finish)
        num_reasoning += len(added) if was_reasoning or splitter.is_reasoning else 0
        parts = _joined(parts, more)
        if finish is not None:
            break
    return parts, kept, finish, stop_reason, num_reasoning


def _split(splitter: AnswerSplitter, text: str, finish: FinishReason | None) -> tuple[AnswerParts, FinishReason | None]:
    """Return the parts of a step's text, and the finish reason if the sample has ended."""
    parts = splitter.feed(text)
    if finish is None and splitter.is_complete:
        finish = FinishReason.STOP
    elif finish is not None:
        parts = _joined(parts, splitter.finish())
    return parts, finish


def _groups(
    tokens: tuple[SampledToken, ...], split: SplitOptions | None, *, is_each_split: bool
) -> list[tuple[SampledToken, ...]]:
    """Return the tokens of a message in the groups that are split together. If the sample ends with its last call, or
    the tokens of the reasoning are counted, each token is a group, so that the number of tokens does not depend on how
    the worker grouped them."""
    if len(tokens) < 2 or not (is_each_split or (split is not None and split.max_calls is not None)):
        return [tokens]
    return [tokens[number : number + 1] for number in range(len(tokens))]


def _joined(first: AnswerParts, second: AnswerParts) -> AnswerParts:
    return AnswerParts(
        first.content + second.content, first.reasoning + second.reasoning, (*first.calls, *second.calls)
    )


def _one_tenant(_authorization: str | None, _address: str) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class TextService:
    """Validates and generates text requests for one model. Shared by the gRPC and HTTP APIs."""

    source: TokenSource
    model: TextModel
    clock: Clock = field(default_factory=SystemClock)
    context_tokens: Callable[[], int | None] = lambda: None
    """Function that returns the workers' current context length in tokens, prompt and output; `None` selects the
    model's."""
    new_seed: prompts.DrawSeed = prompts.draw_seed
    tenant_of: Callable[[str | None, str], str] = _one_tenant
    """Function that returns the tenant for the value of an `authorization` header and the client's host; raises
    Unauthenticated and Overloaded."""
    process: TextProcess | None = None
    """Process that reads large requests; `None` uses a thread."""
    constraints: ConstraintCheck | None = None
    """Checks the constraints of requests; `None` checks them in a thread, without limits of time and memory."""
    adapters: Callable[[], Sequence[AdapterId]] = tuple
    """Function that returns the adapters that requests may currently name."""
    vectors: VectorSource | None = None
    """Computes pooled vectors; `None` if they are not served."""
    searches: SearchSource | None = None
    """Computes the steps of beam searches; with `None`, each step is a stream of `source`."""
    admission: RequestAdmission | None = None
    """Decides which requests may start, and when; `None` starts all requests at once."""

    tracer: Callable[[], Tracer | None] = lambda: None
    """Function that returns the tracer of this process; `None` if requests are not traced."""

    def check_access(self, tenant: str, model: str) -> None:
        """Check that a tenant may use a model.

        Raises:
            UnknownModel: the tenant has no access to the model.
        """
        if self.admission is not None:
            self.admission.check_model(tenant, model)

    def count(self, tenant: str) -> None:
        """Count a request that computes no tokens.

        Raises:
            Overloaded: the tenant's quota of requests is used up.
        """
        if self.admission is not None:
            self.admission.count(tenant)

    def adapter_of(self, name: str) -> AdapterId | None:
        """Return the version of the adapter that a request names as its model; `None` for the model itself.

        Raises:
            UnknownModel: neither the model nor an adapter has this name.
        """
        if name in ("", self.model.name):
            return None
        for adapter in self.adapters():
            if adapter.name == name:
                return adapter
        prompts.check_model(self.model, name)
        return None

    async def read(
        self,
        client: ClientIdentity,
        job: Callable[Concatenate[TextModel, P], R],
        size: int,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run `job(model, ...)` on text of `size` characters or bytes: in this thread if the text is small and cheap,
        otherwise in the text process, as a job of the client. A costly text that is refused counts towards its quota of
        requests.

        Args:
            client: the client that sent the text.
            job: function at module level, whose first argument is the model.
            size: number of characters or bytes of the text.
            args: further arguments of the job.
            kwargs: keyword arguments of the job.

        Raises:
            KvferryError: raised by the job, or by `TextProcess.run`; `Overloaded` also if the text is costly and the
                client's quota of requests is used up.
        """
        if size < LARGE_CHARS:
            with suppress(prompts.BlocksEventLoop):
                return job(self.model, *args, **kwargs)
        with self._charged_if_refused(client.tenant):
            if self.process is None:
                return await asyncio.to_thread(job, replace(self.model, is_off_loop=True), *args, **kwargs)
            return await self.process.run(client.owner, size, job, *args, **kwargs)

    @contextmanager
    def _charged_if_refused(self, tenant: str) -> Iterator[None]:
        """Count a request towards the tenant's quota if the costly check in the `with` block refuses it: a request that
        is accepted is counted when it is admitted.

        Raises:
            Overloaded: the tenant's quota of requests is used up.
        """
        if self.admission is None:
            yield
            return
        self.admission.check_quota(tenant)
        try:
            yield
        except InvalidRequest:
            with suppress(Overloaded):  # requests that were checked at the same time have used it up
                self.admission.count(tenant)
            raise

    async def checked(self, request: Request) -> Request:
        """Check that workers can compile the constraint of a request, if it has one; return the request with the
        constraint's memory. A constraint that is refused counts towards the tenant's quota of requests.

        Raises:
            KvferryError: see `ConstraintCheck.check`; `Overloaded` also if the quota of requests is used up.
        """
        constraint = request.sampling.constraint
        if constraint is None:
            return request
        client = request.caller.client
        with self._charged_if_refused(client.tenant):
            if self.constraints is None:
                cost = await asyncio.to_thread(self.model.check_constraint, constraint)
            else:
                cost = await self.constraints.check(constraint, client.owner)
        sampling = replace(request.sampling, constraint=replace(constraint, cost_bytes=cost))
        return replace(request, sampling=sampling)

    @property
    def served_tokens(self) -> int:
        """Current maximum number of tokens of a request, prompt and output: the context length of the model, or of the
        workers if their KV memory holds less."""
        limit = self.context_tokens()
        return self.model.max_model_tokens if limit is None else min(limit, self.model.max_model_tokens)

    def fit(self, request: Request) -> Request:
        """Truncate the prompt of `request` if it enables that, and complete its sampling parameters; see
        `prompts.fit`.

        Raises:
            InvalidRequest: the request cannot be served with this model.
        """
        if request.beams is not None:
            check_beam_sampling(request.sampling)
        kept = kept_prompt(request.token_ids, request.sampling, self.served_tokens)
        sampling = prompts.fit(self.model, kept, request.sampling, self.served_tokens, self.new_seed)
        check_prompt_logprobs(sampling, len(kept) * request.num_samples)
        return replace(request, token_ids=kept, sampling=sampling)

    def generate(self, request: Request) -> AsyncGenerator[TextChunk, None]:
        """Generate text chunks for a request that `fit` returned, as soon as it is admitted; see `admitted`."""
        return self.admitted((request,), lambda requests: self.generate_now(requests[0]))

    def generate_now(self, request: Request) -> AsyncGenerator[TextChunk, None]:
        """Generate text chunks for a request that was admitted; see `generate_text`."""
        return generate_text(self.source, self.model, request, self.clock, self.searches)

    def admitted(
        self,
        requests: Sequence[Request],
        make: Callable[[Sequence[Request]], AsyncGenerator[TextChunk, None]],
    ) -> AsyncGenerator[TextChunk, None]:
        """Yield the chunks of `make(requests)` as soon as the requests are admitted, all together.

        Args:
            requests: the prompts of one client's request, with equal numbers of samples, or of beams.
            make: starts the generation; the `index` of a chunk is index of the prompt * number of samples + index of
                the sample.

        Raises:
            KvferryError: while iterating: see `admission.Slot` and `generate_text`.
        """
        return make(requests) if self.admission is None else self._admitted(self.admission, requests, make)

    async def _admitted(
        self,
        admission: RequestAdmission,
        requests: Sequence[Request],
        make: Callable[[Sequence[Request]], AsyncGenerator[TextChunk, None]],
    ) -> AsyncGenerator[TextChunk, None]:
        first = requests[0]
        work = RequestSize(
            caller=first.caller,
            prompts=[request.token_ids for request in requests],
            num_samples=first.num_sequences,
            num_running=min(MAX_RUNNING_SAMPLES, len(requests) * first.num_sequences),
            max_tokens=first.sampling.max_tokens or 0,
            is_search=first.beams is not None,
            held_bytes=sum(request.held_bytes for request in requests),
        )
        span = current_span()
        begun = 0.0 if span is None else self.clock.monotonic()
        async with admission.enter(work) as slot:
            caller = slot.admitted(first.caller)
            if span is not None:
                span.phase("queue", begun, attributes={"kvferry.priority": caller.priority})
            if caller is not first.caller:
                # The requests of several prompts have ids of their own.
                changed: dict[str, Any] = {"queued_seconds": caller.queued_seconds, "priority": caller.priority}
                requests = [replace(each, caller=replace(each.caller, **changed)) for each in requests]
            if first.beams is not None:
                requests = [
                    replace(request, on_round=_charge(slot, number, request)) for number, request in enumerate(requests)
                ]
            elif len(requests) * first.num_samples > 1:
                requests = [
                    replace(each, sample_slot=_sample_slots(slot, number, each)) for number, each in enumerate(requests)
                ]
            async with aclosing(make(requests)) as chunks:
                async for chunk in chunks:
                    if first.beams is None:
                        slot.record_tokens(chunk.index, len(chunk.tokens))
                        if chunk.usage is not None:
                            slot.record_usage(chunk.index, chunk.usage.cached_tokens)
                    slot.handed_out()
                    yield chunk
                    slot.taken()


def _sample_slots(slot: Slot, number: int, request: Request) -> Callable[[int], AbstractAsyncContextManager[None]]:
    """Return the function `Request.sample_slot` of prompt `number`."""
    first = number * request.num_samples
    return lambda index: slot.sample_slot(first + index)


def _charge(slot: Slot, number: int, request: Request) -> Callable[[BeamRound], None]:
    """Return a function that charges the rounds of the search of prompt `number`: a token of each beam. The prompt is
    computed for the first beam, and cached for the others."""
    width = request.num_sequences
    beams = range(number * width, (number + 1) * width)

    def charge(done: BeamRound) -> None:
        for beam in beams:
            slot.record_tokens(beam, 1)
            slot.record_usage(beam, done.num_cached if beam == beams[0] else len(request.token_ids))
        slot.record_recomputed(done.num_recomputed)

    return charge
