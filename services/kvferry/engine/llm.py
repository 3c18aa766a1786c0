"""The offline door: prompts in, completions out, one engine in this process."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvferry.core.dtypes import BFLOAT16, INT8
from kvferry.core.errors import InvalidRequest, UsageError
from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams
from kvferry.engine.build_runner import build_runner
from kvferry.engine.cache import PagedKv, PageShape
from kvferry.engine.compute_dtype import choose_dtype
from kvferry.engine.device import choose_device
from kvferry.engine.engine import Engine, one_secret
from kvferry.engine.messages import EngineRequest
from kvferry.engine.models.build import build_model
from kvferry.engine.room import SchedulerLimits
from kvferry.model.config import ModelConfig
from kvferry.model.detokenizer import Detokenizer
from kvferry.model.shapes import shape_of
from kvferry.model.source import ModelSource, open_model
from kvferry.model.stop_strings import StopMatcher
from kvferry.model.tensors import TensorSource
from kvferry.model.tokenizer import Tokenizer

LOAD_FORMATS = ("auto", "dummy")
"""Where weights come from: the model's files, or a generator of random numbers."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt led to."""

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache."""
    logprobs: tuple[SampledToken, ...] = ()
    """The drawn tokens with their log-probabilities; empty unless asked for."""


class LLM:
    """A model, loaded and ready.

        llm = LLM("smollm2-135m-instruct")
        for out in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
            print(out.text)

    Not safe to use from several threads at once.
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
        threads: int = 0,
        seed: int = 0,
    ) -> None:
        """
        Args:
            model: a known name, a `.gguf` file or a folder with safetensors; with `dummy` a name of
                `model.shapes.SHAPES`.
            device: where it computes, and where the pages are: `cpu`, `cuda`, or `auto`, a GPU where torch sees one.
            load_format: `auto`, the model's files; or `dummy`, random weights of its shape, for benchmarks: there is
                no tokenizer then, and prompts are token ids.
            dtype: of the KV, and how precisely activations are kept: `float32`, `bfloat16`, `float16`, `int8`
                (compiled kernels only), or `auto`: bfloat16 with compiled kernels, else the faster one, measured now.
            weights: their form, a name of `models.build.WEIGHTS`.
            numerics: how inputs of products are kept, a name of `models.build.NUMERICS`.
            kernels: what computes, a name of `models.build.KERNELS`.
            cuda_graphs: whether steps are captured on a GPU, a name of `build_runner.CUDA_GRAPHS`.
            kv_bytes: memory for KV pages.
            block_tokens: tokens a page.
            limits: how much one step may do.
            threads: compute threads; 0: one for each core.
            seed: for requests that bring none, and for random weights.

        Raises:
            KvferryError: the model is unknown or damaged, or a setting does not fit it.
        """
        if load_format not in LOAD_FORMATS:
            raise UsageError(f"no load format {load_format!r}; known: {', '.join(LOAD_FORMATS)}", field="load_format")
        where = choose_device(device, kernels=kernels)
        self._source: ModelSource | None = open_model(model) if load_format == "auto" else None
        """`None`: random weights."""
        self._seed = seed
        self._count = 0
        self.config = config = shape_of(model) if self._source is None else self._source.config
        """The model's shape."""
        chosen = choose_dtype(dtype, config, kernels=kernels, device=where)
        tensors = _random(config, chosen, where, seed) if self._source is None else self._source.tensors
        built = build_model(
            config,
            tensors,
            dtype=chosen,
            weights=weights,
            numerics=numerics,
            device=where,
            kernels=kernels,
            threads=threads,
        )
        shape = PageShape.of(config, block_tokens=block_tokens, dtype=chosen)
        num_blocks = max(2, kv_bytes // shape.block_bytes)
        limits = limits or SchedulerLimits()
        self.runner = build_runner(
            built,
            PagedKv.allocate(shape, num_blocks, where),
            max_sequences=limits.max_sequences,
            cuda_graphs=cuda_graphs,
        )
        """Computes the engine's steps."""
        self.engine = Engine(
            self.runner,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            max_model_tokens=config.max_model_tokens,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            fingerprint=b"offline",
            limits=limits,
            tenant_secret=one_secret(b"offline"),
        )
        self.block_bytes = shape.block_bytes
        """Of one page."""
        self.dtype = chosen
        """Of the KV."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            UsageError: the weights are random.
        """
        if self._source is None:
            raise UsageError(
                "random weights (--load-format dummy) have no tokenizer; give token ids instead of text",
                field="load_format",
            )
        return self._source.tokenizer

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete every prompt, a text or its token ids, all in one batch; results in the order of prompts.

        Raises:
            InvalidRequest: a prompt is empty or too long; nothing was generated then.
            UsageError: there is text in a prompt or among the stop strings, and the weights are random.
        """
        chosen = sampling or SamplingParams()
        streams = [self._start(prompt, chosen) for prompt in prompts]
        added: list[RequestId] = []
        try:
            for stream in streams:
                self.engine.add(stream.request)
                added.append(stream.request.request_id)
        except InvalidRequest:
            for request_id in added:
                self.engine.abort(request_id)
            raise
        by_id = {s.request.request_id: s for s in streams}
        while self.engine.has_work:
            for update in self.engine.step().updates:
                if by_id[update.request_id].hear(update.token, update.finish_reason, update.num_cached):
                    self.engine.abort(update.request_id)
        return [s.completion() for s in streams]

    def _start(self, prompt: str | Sequence[int], sampling: SamplingParams) -> "_Stream":
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, add_special=True)
        self._count += 1
        params = sampling if sampling.seed is not None else replace(sampling, seed=self._seed + self._count)
        request = EngineRequest(RequestId(f"offline-{self._count}"), list(prompt), params)
        detokenizer = None if self._source is None and not params.stop else Detokenizer(self.tokenizer)
        return _Stream(request, detokenizer, StopMatcher(params.stop))


def _random(config: ModelConfig, dtype: str, device: str, seed: int) -> TensorSource:
    import torch  # which draws them, and takes a second to load

    from kvferry.engine.models.random_tensors import RandomTensors

    drawn = BFLOAT16 if dtype == INT8 else dtype
    return RandomTensors(config, dtype=getattr(torch, drawn), device=device, seed=seed)


class _Stream:
    """One prompt's output as it grows."""

    def __init__(self, request: EngineRequest, detokenizer: Detokenizer | None, stops: StopMatcher) -> None:
        self.request = request
        self._detokenizer = detokenizer
        self._stops = stops
        self._text = ""
        self._tokens: list[SampledToken] = []
        self._reason: FinishReason | None = None
        self._num_cached = 0

    def hear(self, token: SampledToken, reason: FinishReason | None, num_cached: int) -> bool:
        """Take a token; whether a stop string ended the text, so that the engine must be told."""
        self._tokens.append(token)
        self._num_cached = num_cached
        if self._detokenizer is None:  # no tokenizer, no text
            self._reason = reason
            return False
        self._text += self._stops.feed(self._detokenizer.feed([token.token_id]))
        if self._stops.matched is not None:
            self._reason = FinishReason.STOP
            return reason is None
        if reason is not None:
            self._reason = reason
            self._text += self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
        return False

    def completion(self) -> Completion:
        assert self._reason is not None, "a request ended without a reason"
        return Completion(
            prompt_token_ids=tuple(self.request.token_ids),
            text=self._text,
            token_ids=tuple(t.token_id for t in self._tokens),
            finish_reason=self._reason,
            num_cached_tokens=self._num_cached,
            logprobs=tuple(self._tokens) if self.request.sampling.logprobs is not None else (),
        )
