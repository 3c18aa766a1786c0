"""Protocol-independent text serving: token source, text model, limits, tenants."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.constraint import Constraint
from kvferry.core.ids import AdapterId
from kvferry.core.inference.chunks import TextChunk
from kvferry.core.traces.spans import Tracer, current_span
from kvferry.serving import prompts
from kvferry.serving.admission import Admission, Slot, Work
from kvferry.serving.constraint_check import ConstraintCheck
from kvferry.serving.request import BeamRound, Request
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_process import TextProcess
from kvferry.serving.text_stream import MAX_RUNNING_SAMPLES, generate_text
from kvferry.serving.token_source import SearchSource, TokenSource, VectorSource
from kvferry.text.requests.beams import check_beam_sampling
from kvferry.text.requests.prompt_parameters import check_prompt_logprobs, kept_prompt

P = ParamSpec("P")
R = TypeVar("R")

LARGE_CHARS = 16_384
"""Minimum number of characters of text that is read in the text process; reading so much text takes milliseconds."""


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
    admission: Admission | None = None
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
        self, job: Callable[Concatenate[TextModel, P], R], size: int, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run `job(model, ...)` on text of `size` characters or bytes: in this thread if the text is small, otherwise
        in the text process.

        Args:
            job: function at module level, whose first argument is the model.
            size: number of characters or bytes of the text.
            args: further arguments of the job.
            kwargs: keyword arguments of the job.

        Raises:
            KvferryError: raised by the job, or by `TextProcess.run`.
        """
        if size < LARGE_CHARS:
            return job(self.model, *args, **kwargs)
        if self.process is None:
            return await asyncio.to_thread(job, self.model, *args, **kwargs)
        return await self.process.run(job, *args, **kwargs)

    async def check(self, constraint: Constraint, tenant: str) -> None:
        """Check that workers can compile a constraint of a tenant's request.

        Raises:
            KvferryError: see `ConstraintCheck.check`.
        """
        if self.constraints is None:
            await asyncio.to_thread(self.model.check_constraint, constraint)
        else:
            await self.constraints.check(constraint, tenant)

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
        """Generate text chunks for a request that was admitted; see `serving.text_stream.generate_text`."""
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
        admission: Admission,
        requests: Sequence[Request],
        make: Callable[[Sequence[Request]], AsyncGenerator[TextChunk, None]],
    ) -> AsyncGenerator[TextChunk, None]:
        first = requests[0]
        work = Work(
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
            async with aclosing(make(requests)) as chunks:
                async for chunk in chunks:
                    if first.beams is None:
                        slot.record_tokens(chunk.index, len(chunk.tokens))
                        if chunk.usage is not None:
                            slot.record_usage(chunk.index, chunk.usage.cached_tokens)
                    yield chunk


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
