"""Offline inference API: the class `LLM` completes prompts with one engine in this process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import Progress

from kvferry.core.errors import InvalidRequest, UsageError
from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams, ScoredToken
from kvferry.engine.build import build_engine, load_model, runner_for
from kvferry.engine.messages import EngineRequest
from kvferry.engine.plan.step_budget import SchedulerLimits
from kvferry.engine.settings import EngineSettings
from kvferry.model.requests.output_text import OutputText, StopReason
from kvferry.model.requests.prompt_parameters import (
    check_output_length,
    kept_prompt,
    token_fields,
    with_bad_word_tokens,
)
from kvferry.model.text.chat_template import Message
from kvferry.model.text.detokenizer import Detokenizer
from kvferry.model.text.stop_strings import StopMatcher
from kvferry.model.text.tokenizer import Tokenizer
from kvferry.model.text.tools.definitions import Tool
from kvferry.model.text.tools.prompt import encode_conversation


@dataclass(frozen=True, slots=True)
class Completion:
    """Completion of one prompt."""

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    logprobs: tuple[SampledToken, ...] = ()
    """The sampled tokens with their log-probabilities; empty unless requested."""
    stop_reason: StopReason = None
    """The stop string or stop token id that ended the text; `None` if neither did."""
    prompt_logprobs: tuple[ScoredToken, ...] | None = None
    """Log-probabilities of the prompt's tokens from the second one on; `None` unless requested."""


class LLM:
    """A loaded model with an engine.

        llm = LLM("smollm2-135m-instruct")
        for out in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
            print(out.text)

    Not thread-safe.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        load_format: str = "auto",
        dtype: str = "auto",
        weights: str = "shipped",
        numerics: str = "exact",
        kernels: str = "auto",
        cuda_graphs: str = "auto",
        kv_bytes: int = 1 << 30,
        block_tokens: int = 16,
        limits: SchedulerLimits | None = None,
        async_steps: str = "on",
        threads: int = 0,
        seed: int = 0,
    ) -> None:
        """
        Args:
            model: a catalog name, a `.gguf` file or a folder with safetensors files; a key of `model.shapes.SHAPES` if
                `load_format` is "dummy".
            seed: seed of random weights, and of requests without a seed.

        The other arguments are fields of `EngineSettings`.

        Raises:
            KvferryError: the model is unknown or damaged, or a setting does not fit it.
        """
        self._load(
            EngineSettings(
                model,
                load_format=load_format,
                device=device,
                dtype=dtype,
                weights=weights,
                numerics=numerics,
                kernels=kernels,
                cuda_graphs=cuda_graphs,
                async_steps=async_steps,
                threads=threads,
                kv_bytes=kv_bytes,
                block_tokens=block_tokens,
                limits=limits or SchedulerLimits(),
                seed=seed,
            )
        )

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
        self._loaded = loaded = load_model(settings)
        self._seed = settings.seed
        self._count = 0
        self.config = loaded.config
        """Configuration of the model."""
        self.runner = runner_for(loaded)
        """Runner that computes the engine's steps."""
        self.engine = build_engine(loaded, self.runner, namers=BlockNamers(b"offline"))
        self.model = loaded.model
        """The model, loaded for its kernels."""
        self.block_bytes = loaded.layout.block_bytes
        """Bytes of one page."""
        self.dtype = loaded.dtype
        """Data type of the KV."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model. Raises:
        UsageError: the weights are random.
        """
        if self._loaded.source is None:
            raise UsageError(
                "random weights (--load-format dummy) have no tokenizer; give token ids instead of text",
                field="load_format",
            )
        return self._loaded.source.tokenizer

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts, each a text or its token ids, in one batch; return one completion per prompt, in order.

        Args:
            prompts: the prompts.
            sampling: parameters of all prompts, or one for each.
            progress: whether to show a progress bar on standard error.

        Raises:
            InvalidRequest: the numbers of prompts and parameters differ, a prompt is empty or too long, parameters do
                not fit the model, or every token is banned; no prompt was completed.
            GenerationFailed: a logit is not finite.
            UsageError: the weights are random, but a prompt is a text, or stop strings or bad words are set.
        """
        streams = [self._start(*each) for each in zip(prompts, _for_each(sampling, len(prompts)), strict=True)]
        added: list[RequestId] = []
        try:
            for stream in streams:
                self.engine.add(stream.request)
                added.append(stream.request.request_id)
        except InvalidRequest:
            for request_id in added:
                self.engine.abort(request_id)
            raise
        with Progress(console=Console(stderr=True), disable=not progress) as bar:
            task = bar.add_task("completions", total=len(streams))
            self._run({s.request.request_id: s for s in streams}, lambda: bar.advance(task))
        return [s.completion() for s in streams]

    def chat(
        self,
        conversations: Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Tool] = (),
        progress: bool = False,
    ) -> list[Completion]:
        """Answer conversations in one batch; return one completion per conversation, in order. The text of an answer
        with calls has them in the model's format.

        Args:
            conversations: each a list of messages with `role` and `content`.
            sampling: parameters of all answers, or one for each.
            tools: functions that the model may call.
            progress: whether to show a progress bar on standard error.

        Raises:
            InvalidRequest: see `generate`; the chat template rejects a conversation.
            GenerationFailed: a logit is not finite.
            UsageError: the model has no chat template.
        """
        tokenizer = self.tokenizer
        template = None if self._loaded.source is None else self._loaded.source.chat_template
        if template is None:
            raise UsageError("this model has no chat template; use generate", field="model")
        prompts = [encode_conversation(template, tokenizer, messages, tools) for messages in conversations]
        return self.generate(prompts, sampling, progress=progress)

    def _run(self, by_id: "Mapping[RequestId, _Stream]", on_end: Callable[[], None]) -> None:
        """Step until all requests have ended; abort all if one fails."""
        while self.engine.has_work:
            for update in self.engine.step().updates:
                if update.error is not None:
                    for request_id in by_id:
                        self.engine.abort(request_id)
                    raise update.error
                stream = by_id[update.request_id]
                if update.scores is not None:
                    stream.scores = update.scores
                if stream.take(update.tokens, update.finish_reason, update.num_cached):
                    self.engine.abort(update.request_id)
                if stream.has_ended:
                    on_end()

    def _start(self, prompt: str | Sequence[int], sampling: SamplingParams) -> "_Stream":
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, add_special=True)
        self._count += 1
        params = sampling if sampling.seed is not None else replace(sampling, seed=self._seed + self._count)
        if params.bad_words:
            params = with_bad_word_tokens(params, self.tokenizer)
        self._check(params)
        kept = list(kept_prompt(prompt, params, self.engine.max_model_tokens))
        request = EngineRequest(RequestId(f"offline-{self._count}"), kept, params)
        if self._loaded.source is None and not params.stop:
            return _Stream(request, None)
        detokenizer = Detokenizer(self.tokenizer, shows_control=not params.skip_special_tokens)
        return _Stream(request, OutputText(params, detokenizer, StopMatcher(params.stop) if params.stop else None))

    def _check(self, params: SamplingParams) -> None:
        check_output_length(params)
        for field, ids in token_fields(params).items():
            if ids and max(ids) >= self.config.vocab_size:
                raise InvalidRequest(
                    f"{field} has token id {max(ids)}; the vocabulary has ids 0 to {self.config.vocab_size - 1}",
                    field=field,
                )


def _for_each(sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise InvalidRequest(
            f"sampling has {len(sampling)} parameters for {count} prompts; give one, or one for each", field="sampling"
        )
    return sampling


class _Stream:
    """Output of one prompt while it is being generated."""

    def __init__(self, request: EngineRequest, writer: OutputText | None) -> None:
        self.request = request
        self._writer = writer
        self.scores: tuple[ScoredToken, ...] | None = None
        self._text = ""
        self._tokens: list[SampledToken] = []
        self._reason: FinishReason | None = None
        self._stop_reason: StopReason = None
        self._num_cached = 0

    def take(self, tokens: tuple[SampledToken, ...], reason: FinishReason | None, num_cached: int) -> bool:
        """Append sampled tokens; return whether a stop string ended the text, so that the request must be aborted."""
        self._num_cached = num_cached
        if self._writer is None:  # no tokenizer, no text
            self._tokens += tokens
            self._reason = reason
            return False
        text, kept, self._reason, self._stop_reason = self._writer.add(tokens, reason)
        self._text += text
        self._tokens += kept
        return self._reason is not None and reason is None

    @property
    def has_ended(self) -> bool:
        """Whether the output is complete."""
        return self._reason is not None

    def completion(self) -> Completion:
        assert self._reason is not None, "a request ended without a reason"
        return Completion(
            prompt_token_ids=tuple(self.request.token_ids),
            text=self._text,
            token_ids=tuple(t.token_id for t in self._tokens),
            finish_reason=self._reason,
            num_cached_tokens=self._num_cached,
            logprobs=tuple(self._tokens) if self.request.sampling.logprobs is not None else (),
            stop_reason=self._stop_reason,
            prompt_logprobs=self.scores,
        )
