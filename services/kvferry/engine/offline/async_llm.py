"""Asynchronous offline API: the class `AsyncLLM` serves concurrent prompts with one engine on a separate thread."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from kvferry.core.errors import Unavailable
from kvferry.core.hashing import BlockNamers
from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.tool_inputs import ToolInput, use_from_input
from kvferry.core.inference.tools import Tool
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import EngineSettings
from kvferry.engine.build import build_engine, load_model, runner_for
from kvferry.engine.loop.engine_loop import CommandQueue, EngineLoop
from kvferry.engine.offline.completion import BeamOutput, CompletionPart, Embedding, parts
from kvferry.engine.offline.loop_source import LoopSource
from kvferry.engine.offline.prompts import Prompt, checked_prompt, message_list
from kvferry.engine.offline.requests import OfflineRequests, checked_beam_params, pooling_params
from kvferry.serving.request import Request
from kvferry.text.templates.chat_template import Message


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
            settings: see `LLM`.

        Raises:
            KvferryError: the model is unknown or damaged, or a setting does not fit it.
        """
        loaded = load_model(EngineSettings.of(model, **settings), releases_windows=True)
        self.config = loaded.config
        """Configuration of the model."""
        commands = CommandQueue()
        self.engine = build_engine(
            loaded,
            runner_for(loaded),
            namers=BlockNamers(b"offline"),
            post=commands.put,
        )
        """The engine; only its thread may use it before `aclose`."""
        owner = EngineLoop(
            self.engine,
            commands,
            name="engine",
            on_failure=lambda _: None,
            stream_interval=loaded.settings.stream_interval,
        )
        self._source = LoopSource(owner, wait_seconds=wait_seconds)
        self._requests = OfflineRequests(loaded, self.engine, self._source)

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
        if not await self._source.aclose():
            raise Unavailable("the engine's step did not end in time; its thread ends with the process")
        for name in self._source.open:  # the thread has ended, so it cannot execute their aborts
            self.engine.abort(name)
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
        request = await asyncio.to_thread(self._requests.completion, prompt, sampling or SamplingParams())
        async with aclosing(self._parts(request)) as found:
            async for part in found:
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
        request = await asyncio.to_thread(self._requests.answer, messages, params, use, None, variables)
        async with aclosing(self._parts(request)) as found:
            async for part in found:
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
        """
        params = pooling_params(pooling, normalize, dimensions, self.config.hidden_size)
        request = await asyncio.to_thread(self._requests.vector, checked_prompt(prompt))
        vector = await self._source.pool(request, params)
        return Embedding(tuple(request.token_ids), vector.values, vector.num_cached_tokens)

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
        request = await asyncio.to_thread(self._requests.search, checked_prompt(prompt), params)
        return await self._requests.beams(request, params)

    def _parts(self, request: Request) -> AsyncGenerator[CompletionPart, None]:
        return parts(request, self._requests.service.generate(request))
