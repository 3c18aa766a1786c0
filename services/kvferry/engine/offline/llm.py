"""Offline inference API: the class `LLM` completes prompts with one engine in this process."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import AdapterId
from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.tool_inputs import ToolInput, use_from_input
from kvferry.core.inference.tools import Tool
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import EngineSettings
from kvferry.engine.adapter_settings import check_adapter_name
from kvferry.engine.build import build_engine, load_adapter, load_model, runner_for
from kvferry.engine.offline.completion import BeamOutput, Completion, Embedding, completed
from kvferry.engine.offline.prompts import Prompt, conversation_list, pairs, prompt_key, prompt_list
from kvferry.engine.offline.requests import OfflineRequests, adapter_named, checked_beam_params, pooling_params
from kvferry.engine.offline.run import run
from kvferry.engine.offline.step_source import StepSource
from kvferry.serving.request import Request
from kvferry.text.requests.pooling import cosine
from kvferry.text.templates.chat_template import Message
from kvferry.text.tokenizing.tokenizer import Tokenizer

__all__ = ["LLM", "Completion", "Embedding"]

_MAX_LIVE = 512
"""Maximum number of beams at a time; an engine rejects more than 1024 waiting requests."""
T = TypeVar("T")


class LLM:
    """A loaded model with an engine.

        llm = LLM("smollm2-135m-instruct")
        for out in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
            print(out.text)

    Not thread-safe.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        """
        Args:
            model: a catalog name, a `.gguf` file, a folder with safetensors files, or `ORG/NAME` on the Hugging Face
                Hub (see docs/models.md); a key of `model.shapes.SHAPES` if `load_format` is "dummy".
            settings: fields of `EngineSettings` and `SchedulerLimits`, which have the names of the flags of `kvferry
                worker`; `adapters` has folders of LoRA adapters by name.

        Raises:
            KvferryError: the model is unknown or damaged, or a setting is unknown, invalid or does not fit the model.
        """
        self._load(EngineSettings.of(model, **settings))

    @classmethod
    def of(cls, settings: EngineSettings) -> "LLM":
        """Build an LLM from engine settings.

        Raises:
            KvferryError: the model is unknown or damaged, or a setting does not fit it.
        """
        made = cls.__new__(cls)
        made._load(settings)
        return made

    def _load(self, settings: EngineSettings) -> None:
        self._loaded = loaded = load_model(settings, releases_windows=True)
        self.config = loaded.config
        """Configuration of the model."""
        self.runner = runner_for(loaded)
        """Runner that computes the engine's steps."""
        self.engine = build_engine(loaded, self.runner, namers=BlockNamers(b"offline"))
        self._source = StepSource(self.engine)
        self._requests = OfflineRequests(loaded, self.engine, self._source)
        self.model = loaded.model
        """The model, loaded for its kernels."""
        self.block_bytes = loaded.layout.block_bytes
        """Bytes of one page."""
        self.token_bytes = loaded.layout.token_bytes
        """Bytes of the KV of one token, all layers."""
        self.dtype = loaded.dtype
        """Data type of the KV."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model.

        Raises:
            UsageError: the weights are random.
        """
        return self._requests.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        model: str | Sequence[str] = "",
        progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts, each a string or a list of token ids, in one batch; return one completion per prompt, in
        order.

        Args:
            prompts: one or several prompts.
            sampling: parameters of all prompts, or one for each.
            model: name of an adapter, for all prompts or one for each; empty, or the model's own name, for none.
            progress: whether to show a progress bar on standard error.

        Raises:
            InvalidRequest: the numbers of prompts and parameters differ, a prompt is empty or too long, parameters do
                not fit the model, or every token is banned; no prompt was completed.
            UnknownModel: no adapter has this name.
            GenerationFailed: a logit is not finite.
            UsageError: the weights are random, but a prompt is a string, or stop strings or bad words are set.
        """
        prompts = prompt_list(prompts)
        params = _for_each(sampling, len(prompts))
        adapters = self._adapters(model, len(prompts))
        requests = [self._requests.completion(*each) for each in zip(prompts, params, adapters, strict=True)]
        return self._complete(requests, progress, "completions")

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        progress: bool = False,
    ) -> list[Embedding]:
        """Compute a vector for each prompt, a string or a list of token ids, in one batch; return them in order.

        The vector is pooled from the model's hidden states after the final norm. Vectors of a model that was trained to
        generate text rather than to compare it are all similar, so compare them only with each other.

        Args:
            prompts: one or several prompts.
            pooling: `last`, `mean` or `cls`; see `core.inference.pooling.Pooling`.
            normalize: whether vectors have an L2 norm of 1.
            dimensions: number of leading values to keep, before a vector is normalized; `None` for all.
            progress: whether to show a progress bar on standard error.

        Raises:
            InvalidRequest: a prompt is empty or too long, or a parameter is out of range; no vector is returned.
            GenerationFailed: a hidden state is not finite.
            UsageError: the weights are random, but a prompt is a string.
        """
        params = pooling_params(pooling, normalize, dimensions, self.config.hidden_size)
        requests = [self._requests.vector(prompt) for prompt in prompt_list(prompts)]
        vectors = self._all([self._source.pool(request, params) for request in requests], progress, "vectors")
        return [
            Embedding(tuple(request.token_ids), vector.values, vector.num_cached_tokens)
            for request, vector in zip(requests, vectors, strict=True)
        ]

    embed = encode

    def score(
        self, a: Prompt | Sequence[Prompt], b: Prompt | Sequence[Prompt], *, pooling: str = "last"
    ) -> list[float]:
        """Compute the cosine similarity of pairs of prompts by their vectors; see `encode` for its limits.

        Args:
            a: one prompt, or as many as `b` has.
            b: one or several prompts.
            pooling: see `encode`.

        Returns:
            A number from -1 to 1 for each pair, in order.

        Raises:
            InvalidRequest: see `encode`; the numbers of prompts do not match.
        """
        compared = pairs(a, b)
        distinct = list(dict.fromkeys(prompt_key(prompt) for pair in compared for prompt in pair))
        vectors = dict(zip(distinct, self.encode(distinct, pooling=pooling), strict=True))
        return [
            cosine(vectors[prompt_key(left)].embedding, vectors[prompt_key(right)].embedding)
            for left, right in compared
        ]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamParams | None = None, *, progress: bool = False
    ) -> list[list[BeamOutput]]:
        """Search for the most probable outputs of prompts; return at most `width` outputs per prompt, the best first.

        Args:
            prompts: one or several prompts, each a string or a list of token ids.
            params: width and limits of the search.
            progress: whether to show a progress bar on standard error.

        Raises:
            InvalidRequest: a prompt is empty or too long.
            GenerationFailed: a logit is not finite.
            UsageError: the weights are random, but a prompt is a string.
        """
        params = checked_beam_params(params)
        requests = [self._requests.search(prompt, params) for prompt in prompt_list(prompts)]
        together = asyncio.Semaphore(max(1, _MAX_LIVE // params.width))

        async def found(request: Request) -> list[BeamOutput]:
            async with together:
                return await self._requests.beams(request, params)

        return self._all([found(request) for request in requests], progress, "searches")

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Tool | ToolInput] = (),
        tool_choice: str | Mapping[str, object] = "auto",
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
        model: str | Sequence[str] = "",
        progress: bool = False,
    ) -> list[Completion]:
        """Answer conversations in one batch; return one completion per conversation, in order. Reasoning and tool calls
        are not part of an answer's text.

        Args:
            conversations: one or several, each a list of messages with `role` and `content`.
            sampling: parameters of all answers, or one for each.
            tools: tools that the model may call.
            tool_choice: `auto`, `none`, `required`, or the name of the tool to call.
            parallel_tool_calls: whether an answer may have several calls.
            chat_template_kwargs: further variables of the chat template, such as `enable_thinking`.
            model: see `generate`.
            progress: whether to show a progress bar on standard error.

        Raises:
            InvalidRequest: see `generate`; or the chat template rejects a conversation, or a call is required together
                with another constraint.
            UnknownModel: see `generate`.
            GenerationFailed: a logit is not finite.
            UsageError: the model has no chat template.
        """
        several = conversation_list(conversations)
        params, adapters = _for_each(sampling, len(several)), self._adapters(model, len(several))
        use = use_from_input(tools, tool_choice, is_parallel=parallel_tool_calls)
        requests = [
            self._requests.answer(messages, each, use, adapter, chat_template_kwargs)
            for messages, each, adapter in zip(several, params, adapters, strict=True)
        ]
        return self._complete(requests, progress, "answers")

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter, or replace the one of the same name.

        Args:
            name: name by which requests select the adapter; must differ from the model's name.
            path: the adapter's folder.

        Raises:
            UsageError: the name is not valid, or the model's kernels do not support adapters.
            ModelFileError: the folder is missing or damaged, or the adapter does not fit the model.
        """
        check_adapter_name(name, self.config.name)
        self.engine.change_adapter(name, load_adapter(self._loaded, Path(path)))

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter.

        Raises:
            UnknownModel: no adapter has this name.
        """
        self.engine.change_adapter(name, None)

    def close(self) -> None:
        """Stop the processes of the other ranks at once, with `tensor_parallel`; otherwise they end with the object or
        this process. Idempotent; nothing can be generated afterwards."""
        self._loaded.close()

    def _adapters(self, model: str | Sequence[str], count: int) -> list[AdapterId | None]:
        """Return the adapter of each prompt, by the model names of the requests."""
        names = [model] * count if isinstance(model, str) else list(model)
        if len(names) != count:
            raise InvalidRequest(
                f"model has {len(names)} names for {count} prompts; pass one name, or one per prompt", field="model"
            )
        return [adapter_named(self.engine, self.config.name, name) for name in names]

    def _complete(self, requests: Sequence[Request], progress: bool, label: str) -> list[Completion]:
        service = self._requests.service
        work = [completed(request, service.generate(request)) for request in requests]
        return self._all(work, progress, label)

    def _all(self, work: Sequence[Coroutine[Any, Any, T]], progress: bool, label: str) -> list[T]:
        """Do all work at the same time, and return the results in order. If a part fails, all others are cancelled.

        Args:
            work: the parts.
            progress: whether to show a progress bar on standard error.
            label: what the bar counts.
        """

        async def together() -> list[T]:
            with Progress(console=Console(stderr=True), disable=not progress) as bar:
                shown = bar.add_task(label, total=len(work))
                tasks = [asyncio.create_task(part) for part in work]
                for task in tasks:
                    task.add_done_callback(lambda _: bar.advance(shown))
                try:
                    return list(await asyncio.gather(*tasks))
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                    self._source.drain()

        return run(together())


def _for_each(sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if not isinstance(sampling, Sequence) or not all(isinstance(one, SamplingParams) for one in sampling):
        raise InvalidRequest(
            f"sampling must be SamplingParams or a list of them, not {shortened(repr(sampling))}", field="sampling"
        )
    if len(sampling) != count:
        raise InvalidRequest(
            f"sampling has {len(sampling)} items for {count} prompts; pass one, or one per prompt", field="sampling"
        )
    return sampling
