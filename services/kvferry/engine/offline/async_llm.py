"""Asynchronous offline API: the class `AsyncLLM` serves concurrent prompts with one engine on a separate thread."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from kvferry.core.errors import DeadlinePassed, InvariantBroken, Unavailable, UsageError
from kvferry.core.hashing import BlockNamers
from kvferry.core.sampling import SamplingParams
from kvferry.engine.build import build_engine, load_model, runner_for
from kvferry.engine.loop.engine_loop import CommandQueue, EngineLoop
from kvferry.engine.loop.engine_stream import EngineStream
from kvferry.engine.offline.beam_search import BeamOutput, checked_beam_params, new_beams, step_request
from kvferry.engine.offline.completion import CompletionPart, CompletionStream
from kvferry.engine.offline.embedding import Embedding, embedding_of, pooling_params
from kvferry.engine.offline.prompts import Prompt, checked_prompt, message_list
from kvferry.engine.offline.request_builder import RequestBuilder
from kvferry.engine.schedule.messages import EngineRequest, MaskReady
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.engine.settings import EngineSettings
from kvferry.text.requests.beams import Alternatives, BeamParams
from kvferry.text.templates.chat_template import Message
from kvferry.text.tools.definitions import Tool
from kvferry.text.tools.inputs import ToolInput, use_from_input


class AsyncLLM:
    """A loaded model with an engine, for programs with an event loop.

        async with await AsyncLLM.open("smollm2-135m-instruct") as llm:
            async for part in llm.generate("The capital of France is", SamplingParams(max_tokens=16)):
                print(part.text, end="")

    Supports concurrent calls on one event loop. Close an iterator that is not read to its end (`contextlib.aclosing`),
    or cancel the task that reads it; both abort its request.
    """

    def __init__(self, model: str, *, wait_seconds: float = 600.0, **settings: Any) -> None:
        """Load a model, which takes seconds; on an event loop, use `open`.

        Args:
            model: see `LLM`.
            wait_seconds: seconds without an output after which a request fails.
            settings: fields of `EngineSettings`.

        Raises:
            KvferryError: the model is unknown or damaged, or a setting does not fit it.
        """
        loaded = load_model(EngineSettings(model, **settings), releases_windows=True)
        self.config = loaded.config
        """Configuration of the model."""
        commands = CommandQueue()
        self.engine = build_engine(
            loaded,
            runner_for(loaded),
            namers=BlockNamers(b"offline"),
            on_mask=lambda: commands.put(MaskReady()),
        )
        """The engine; only its thread may use it before `aclose`."""
        self._requests = RequestBuilder(loaded, max_model_tokens=self.engine.max_model_tokens)
        self._owner = EngineLoop(
            self.engine,
            commands,
            name="engine",
            on_failure=lambda _: None,
            stream_interval=loaded.settings.stream_interval,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[EngineStream] = set()
        self._wait_seconds = wait_seconds
        self._is_closed = False

    @classmethod
    async def open(cls, model: str, *, wait_seconds: float = 600.0, **settings: Any) -> Self:
        """Load a model on another thread; see `AsyncLLM`."""
        return await asyncio.to_thread(cls, model, wait_seconds=wait_seconds, **settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop the engine after its step in progress, which takes at most 10 s; open iterators raise `Unavailable`.
        Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._loop is not None:
            await self._owner.stop()
            if self._owner.is_running:
                raise Unavailable("the engine's step did not end in time; its thread ends with the process")
        for stream in self._open:  # the thread has ended, so it cannot execute their aborts
            self.engine.abort(stream.request_id)
        if self.engine.has_work:  # a step that was launched ahead
            await asyncio.to_thread(self.engine.step)

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None
    ) -> AsyncGenerator[CompletionPart, None]:
        """Complete a prompt; yield the part that each step adds. The last part has the whole completion.

        Args:
            prompt: a string or a list of token ids.
            sampling: parameters of the prompt.

        Raises:
            InvalidRequest: see `LLM.generate`.
            GenerationFailed: a logit is not finite.
            Overloaded: too many requests are waiting.
            DeadlinePassed: there was no output for `wait_seconds`.
            Unavailable: the engine has stopped.
        """
        prompt = checked_prompt(prompt)
        made = await asyncio.to_thread(self._requests.start, prompt, sampling or SamplingParams())
        async with aclosing(self._parts(made)) as parts:
            async for part in parts:
                yield part

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Tool | ToolInput] = (),
        tool_choice: str | Mapping[str, object] = "auto",
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> AsyncGenerator[CompletionPart, None]:
        """Answer a conversation; yield the text, reasoning and calls that each step adds. See `generate`.

        Args:
            messages: messages with `role` and `content`.
            sampling: parameters of the answer.
            tools: tools that the model may call.
            tool_choice: `auto`, `none`, `required`, or the name of the tool to call.
            parallel_tool_calls: whether an answer may have several calls.
            chat_template_kwargs: further variables of the chat template, such as `enable_thinking`.

        Raises:
            KvferryError: see `generate` and `LLM.chat`.
        """
        messages = message_list(messages)
        params, variables = sampling or SamplingParams(), chat_template_kwargs
        use = use_from_input(tools, tool_choice, is_parallel=parallel_tool_calls)
        made = await asyncio.to_thread(self._requests.start_chat, messages, params, use, None, variables)
        async with aclosing(self._parts(made)) as parts:
            async for part in parts:
                yield part

    async def encode(
        self, prompt: Prompt, *, pooling: str = "last", normalize: bool = True, dimensions: int | None = None
    ) -> Embedding:
        """Compute the vector of a prompt; see `LLM.encode`. Cancelling the calling task aborts the request.

        Args:
            prompt: a string or a list of token ids.
            pooling: hidden states that the vector is made of: `last`, `mean` or `cls`.
            normalize: whether the vector gets an L2 norm of 1.
            dimensions: number of leading values to keep, before normalizing; `None` for all.

        Raises:
            KvferryError: see `generate` and `LLM.encode`.
            InvariantBroken: the request ended without a vector.
        """
        params = pooling_params(pooling, normalize, dimensions, self.config.hidden_size)
        request = await asyncio.to_thread(self._requests.start_pooling, checked_prompt(prompt), params)
        async with aclosing(self._updates(request)) as updates:
            async for update in updates:
                if update.embedding is not None:
                    return embedding_of(request, update)
        raise InvariantBroken(f"request {request.request_id} ended without a vector")

    async def beam_search(self, prompt: Prompt, params: BeamParams | None = None) -> list[BeamOutput]:
        """Search for the most probable outputs of a prompt; return at most `width` outputs, the best first. Cancelling
        the calling task aborts the search.

        Args:
            prompt: a string or a list of token ids.
            params: width and limits of the search.

        Raises:
            KvferryError: see `generate` and `LLM.beam_search`.
        """
        params = checked_beam_params(params)
        ids = await asyncio.to_thread(self._requests.tokens, checked_prompt(prompt))
        beams = new_beams(ids, params, self.engine.max_model_tokens, self.config.eos_token_ids)
        while not beams.is_done:
            requests = [step_request(ids, beam, params) for beam in beams.live]
            steps = [asyncio.create_task(self._alternatives(request)) for request in requests]
            try:
                beams.advance(await asyncio.gather(*steps))
            finally:
                for step in steps:
                    step.cancel()
                await asyncio.gather(*steps, return_exceptions=True)
        return [self._requests.beam_output(beam, params) for beam in beams.best(params.width)]

    async def _alternatives(self, request: EngineRequest) -> Alternatives:
        """Return the most likely first tokens of a request."""
        async with aclosing(self._updates(request)) as updates:
            async for update in updates:
                if update.tokens:
                    return update.tokens[0].top
        raise InvariantBroken(f"request {request.request_id} ended without a token")

    async def _parts(self, made: CompletionStream) -> AsyncGenerator[CompletionPart, None]:
        async with aclosing(self._updates(made.request)) as updates:
            async for update in updates:
                part = made.add(update)
                yield part
                if part.completion is not None:
                    return

    async def _updates(self, request: EngineRequest) -> AsyncGenerator[SequenceUpdate, None]:
        self._start()
        stream = self._owner.submit(request)
        self._open.add(stream)
        try:
            with stream:
                while (update := await self._next(stream)) is not None:
                    yield update
        finally:
            if not self._is_closed:
                self._open.discard(stream)

    async def _next(self, stream: EngineStream) -> SequenceUpdate | None:
        """Return the next update; `None` after the last one."""
        try:
            async with asyncio.timeout(self._wait_seconds):
                async for item in stream:
                    if item.update is not None:
                        return item.update
        except TimeoutError:
            raise DeadlinePassed(f"there was no output for {self._wait_seconds:g} s") from None
        return None

    def _start(self) -> None:
        """Start the engine's thread with the first request."""
        running = asyncio.get_running_loop()
        if self._is_closed:
            raise Unavailable("this AsyncLLM is closed")
        if self._loop is None:
            self._loop = running
            self._owner.start()
        elif self._loop is not running:
            raise UsageError("an AsyncLLM serves one event loop; create another one for this loop")
