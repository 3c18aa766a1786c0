"""Offline inference API: the class `LLM` completes prompts with one engine in this process."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import Progress

from kvferry.core.errors import InvalidRequest, UsageError
from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams, ScoredToken
from kvferry.engine.build import build_engine, load_model, runner_for
from kvferry.engine.embedding import Embedding, Prompt, embedding_of, pairs, pooling_params, pooling_request, prompt_key
from kvferry.engine.messages import EngineRequest
from kvferry.engine.plan.kv_jobs import SequenceUpdate
from kvferry.engine.plan.step_budget import SchedulerLimits
from kvferry.engine.settings import EngineSettings
from kvferry.model.requests.output_text import OutputText, StopReason
from kvferry.model.requests.pooling import cosine
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

_MAX_WAITING = 512
"""Number of waiting requests up to which further ones are added; the engine rejects more than 1024."""


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
        prompts: Sequence[Prompt],
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
        by_id = {stream.request.request_id: stream for stream in streams}
        self._run(
            [stream.request for stream in streams],
            lambda update: by_id[update.request_id].add(update),
            "completions" if progress else None,
        )
        return [s.completion() for s in streams]

    def encode(
        self,
        prompts: Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        progress: bool = False,
    ) -> list[Embedding]:
        """Compute a vector of each prompt, each a text or its token ids, in one batch; return them in order.

        The vector is made of the model's hidden states after the final norm. A model that was trained to generate text
        and not to compare it gives vectors of which all are similar; compare them with each other only.

        Args:
            prompts: the prompts.
            pooling: `last`, `mean` or `cls`; see `model.requests.pooling.Pooling`.
            normalize: whether vectors have an L2 norm of 1.
            dimensions: number of leading values to keep, before a vector is normalized; `None` for all.
            progress: whether to show a progress bar on standard error.

        Raises:
            InvalidRequest: a prompt is empty or too long, or a parameter is out of range; no vector is returned.
            GenerationFailed: a hidden state is not finite.
            UsageError: the weights are random, but a prompt is a text.
        """
        params = pooling_params(pooling, normalize, dimensions, self.config.hidden_size)
        requests = [pooling_request(self._next_id(), self._tokens(prompt), params) for prompt in prompts]
        found: dict[RequestId, SequenceUpdate] = {}

        def take(update: SequenceUpdate) -> bool:
            found[update.request_id] = update
            return False

        self._run(requests, take, "vectors" if progress else None)
        return [embedding_of(request, found[request.request_id]) for request in requests]

    embed = encode

    def score(
        self, a: Prompt | Sequence[Prompt], b: Prompt | Sequence[Prompt], *, pooling: str = "last"
    ) -> list[float]:
        """Compute the cosine similarity of pairs of prompts by their vectors; see `encode` for what it is worth.

        Args:
            a: one prompt, or as many as `b` has.
            b: one or several prompts.
            pooling: see `encode`.

        Returns:
            A number from -1 to 1 for each pair, in order.

        Raises:
            InvalidRequest: see `encode`; the numbers of prompts do not fit.
        """
        compared = pairs(a, b)
        distinct = list(dict.fromkeys(prompt_key(prompt) for pair in compared for prompt in pair))
        vectors = dict(zip(distinct, self.encode(distinct, pooling=pooling), strict=True))
        return [
            cosine(vectors[prompt_key(left)].embedding, vectors[prompt_key(right)].embedding)
            for left, right in compared
        ]

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

    def _run(
        self, requests: Sequence[EngineRequest], take: Callable[[SequenceUpdate], bool], shown: str | None
    ) -> None:
        """Step until all requests have ended; abort all if one is rejected or fails.

        Args:
            requests: the requests; they are added while the engine's queue has room.
            take: takes an update; returns whether a request that the engine continues has ended.
            shown: label of the progress bar; `None` for no bar.
        """
        waiting = deque(requests)
        with Progress(console=Console(stderr=True), disable=shown is None) as bar:
            task = bar.add_task(shown or "", total=len(requests))
            try:
                while waiting or self.engine.has_work:
                    while waiting and self.engine.scheduler.num_waiting < _MAX_WAITING:
                        self.engine.add(waiting.popleft())
                    for update in self.engine.step().updates:
                        if update.error is not None:
                            raise update.error
                        ends = take(update)
                        if ends:
                            self.engine.abort(update.request_id)
                        if ends or update.finish_reason is not None:
                            bar.advance(task)
            except BaseException:
                for request in requests:
                    self.engine.abort(request.request_id)
                raise

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt

    def _next_id(self) -> RequestId:
        self._count += 1
        return RequestId(f"offline-{self._count}")

    def _start(self, prompt: Prompt, sampling: SamplingParams) -> "_Stream":
        prompt = self._tokens(prompt)
        request_id = self._next_id()
        params = sampling if sampling.seed is not None else replace(sampling, seed=self._seed + self._count)
        if params.bad_words:
            params = with_bad_word_tokens(params, self.tokenizer)
        self._check(params)
        kept = list(kept_prompt(prompt, params, self.engine.max_model_tokens))
        request = EngineRequest(request_id, kept, params)
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

    def add(self, update: SequenceUpdate) -> bool:
        """Append sampled tokens; return whether a stop string ended the text, so that the request must be aborted."""
        tokens, reason = update.tokens, update.finish_reason
        self._num_cached = update.num_cached
        if update.scores is not None:
            self.scores = update.scores
        if self._writer is None:  # no tokenizer, no text
            self._tokens += tokens
            self._reason = reason
            return False
        text, kept, self._reason, self._stop_reason = self._writer.add(tokens, reason)
        self._text += text
        self._tokens += kept
        return self._reason is not None and reason is None

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
