"""Requests of the offline API: prompts and conversations as validated requests of `kvferry.serving`."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvferry.core.errors import InvalidRequest, UnknownModel, UsageError, shortened
from kvferry.core.ids import AdapterId, RequestId
from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.pooling import PoolingParams, pooling_named
from kvferry.core.inference.tool_inputs import calls_from_input, content_from_input
from kvferry.core.inference.tools import ToolUse
from kvferry.core.sampling import NO_SAMPLING, SamplingParams
from kvferry.engine.build import LoadedModel
from kvferry.engine.engine import Engine
from kvferry.engine.offline.completion import BeamOutput
from kvferry.engine.offline.prompts import Prompt
from kvferry.serving import beam_search, embedding, prompts
from kvferry.serving.model_text import text_model_of
from kvferry.serving.prompts import prepare_chat
from kvferry.serving.request import Caller, Request
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_service import TextService
from kvferry.serving.token_source import TokenSource
from kvferry.text.answers.answer import SplitOptions
from kvferry.text.requests.output_text import StopFinder
from kvferry.text.requests.pooling import check_dimensions
from kvferry.text.templates.chat_template import Message
from kvferry.text.tokenizing.tokenizer import Tokenizer
from kvferry.text.tools.conversations import call_input


class OfflineRequests:
    """Creates the requests of one model, as a gateway does for its clients: with the same checks and limits."""

    def __init__(self, loaded: LoadedModel, engine: Engine, source: TokenSource) -> None:
        """
        Args:
            loaded: the model.
            engine: its engine, for the context length.
            source: generates the tokens.
        """
        self._loaded = loaded
        self._numbers = itertools.count(1)
        seeds = itertools.count(loaded.settings.seed + 1)
        self.service = TextService(
            source,
            _text_model(loaded),
            context_tokens=lambda: engine.max_model_tokens,
            new_seed=lambda: next(seeds),
        )
        """Text serving over the engine."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model.

        Raises:
            UsageError: the weights are random.
        """
        if self._loaded.source is None:
            raise _no_tokenizer()
        return self._loaded.source.tokenizer

    def completion(self, prompt: Prompt, sampling: SamplingParams, adapter: AdapterId | None = None) -> Request:
        """Create the request of a prompt.

        Args:
            prompt: a string or token ids.
            sampling: parameters of the completion.
            adapter: version of the adapter to use; `None` for the base model.

        Raises:
            InvalidRequest: a parameter does not fit the model, or conflicts with another parameter.
            UsageError: the weights are random, but the prompt is a string, or stop strings or bad words are set.
        """
        if sampling.stop and self._loaded.source is None:
            raise _no_tokenizer()
        ids = prompts.encode_text(self.service.model, prompt) if isinstance(prompt, str) else prompt
        return self._fit(ids, sampling, adapter)

    def answer(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        use: ToolUse,
        adapter: AdapterId | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> Request:
        """Create the request for the answer of a conversation; see `completion`.

        Args:
            messages: messages of the conversation, oldest first.
            sampling: parameters of the answer.
            use: the tools that are offered, and how they may be used.
            adapter: adapter to use; `None` for the model itself.
            variables: further variables of the chat template.

        Raises:
            InvalidRequest: a message has an unknown form or role, a call and its result do not belong together, the
                chat template rejects the conversation, or a call is required together with another constraint.
            UsageError: the model has no chat template.
        """
        if self.service.model.encode_chat is None:
            raise UsageError("this model has no chat template; use generate", field="model")
        given = [_template_message(message, f"messages.{number}") for number, message in enumerate(messages)]
        model = replace(self.service.model, is_off_loop=True)  # no event loop waits for the caller's thread
        chat = prepare_chat(model, given, use, sampling, variables)
        return self._fit(chat.token_ids, chat.sampling, adapter, chat.split)

    def vector(self, prompt: Prompt) -> Request:
        """Create the request for the vector of a prompt.

        Raises:
            InvalidRequest: the prompt is empty or too long, or a token id is not in the vocabulary.
            UsageError: the weights are random, but the prompt is a string.
        """
        (ids,) = embedding.encode_inputs(self.service.model, [prompt], ["prompt"], self.service.served_tokens)
        return Request(self._caller(None), ids, NO_SAMPLING)

    def search(self, prompt: Prompt, params: BeamParams) -> Request:
        """Create the request of a beam search.

        Raises:
            InvalidRequest: the prompt is empty or too long, or a token id is not in the vocabulary.
            UsageError: the weights are random, but the prompt is a string.
        """
        sampling = SamplingParams(temperature=0.0, max_tokens=params.max_tokens)
        return replace(self.completion(prompt, sampling), beams=params, num_samples=params.width)

    async def beams(self, request: Request, params: BeamParams) -> list[BeamOutput]:
        """Search for the best outputs of a prompt; return at most `width`, the best first.

        Args:
            request: the request, from `search`.
            params: parameters of the search.

        Raises:
            KvferryError: see `TokenSource.stream`.
        """
        model = self.service.model
        found = await beam_search.search(self.service.source, request, params, model.eos_token_ids)
        outputs = []
        for beam in found.beams:
            assert beam.finish_reason is not None, "only an ended beam is an output"
            detokenizer = model.new_detokenizer(False, {})
            text = detokenizer.feed(beam.tokens) + detokenizer.finish()
            score = beam.score(params.length_penalty)
            outputs.append(BeamOutput(text, beam.tokens, beam.logprob, score, beam.finish_reason))
        return outputs

    def _fit(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        adapter: AdapterId | None,
        split: SplitOptions | None = None,
    ) -> Request:
        return self.service.fit(Request(self._caller(adapter), token_ids, sampling, split=split))

    def _caller(self, adapter: AdapterId | None) -> Caller:
        arrived = self.service.clock.monotonic()
        return Caller(RequestId(f"offline-{next(self._numbers)}"), adapter=adapter, arrived=arrived)


def pooling_params(pooling: str, normalize: bool, dimensions: int | None, hidden_size: int) -> PoolingParams:
    """Check the parameters of a vector.

    Args:
        pooling: name of a `Pooling`.
        normalize: whether the vector is scaled to length 1.
        dimensions: number of leading values to return; `None` for all.
        hidden_size: number of values of the model's vectors.

    Raises:
        InvalidRequest: the pooling is unknown, or there are too many or too few dimensions.
    """
    check_dimensions(dimensions, hidden_size)
    return PoolingParams(pooling_named(pooling), normalize, dimensions)


def checked_beam_params(params: object) -> BeamParams:
    """Return the parameters of a search; the defaults for `None`.

    Raises:
        InvalidRequest: `params` is neither a `BeamParams` nor `None`.
    """
    if params is None:
        return BeamParams()
    if not isinstance(params, BeamParams):
        raise InvalidRequest(f"params must be a BeamParams, not {type(params).__name__}", field="params")
    return params


def adapter_named(engine: Engine, model: str, name: str) -> AdapterId | None:
    """Return the version of the adapter that a request names as its model; `None` for the model itself.

    Args:
        engine: the engine.
        model: name of the model.
        name: name in the request; empty for the model.

    Raises:
        UnknownModel: no adapter has this name.
    """
    if name in ("", model):
        return None
    if engine.adapters is None:
        raise UnknownModel(
            f"model {shortened(name)!r} is not served here, and this LLM has no adapters; use {model!r}", field="model"
        )
    return engine.adapters.resolve(name)


def _template_message(message: Message, where: str) -> dict[str, object]:
    """Return a caller's message in the form that chat templates expect."""
    calls = [call_input(call.call_id, call.name, call.arguments) for call in calls_from_input(message, where)]
    return {**message, "content": content_from_input(message, where), **({"tool_calls": calls} if calls else {})}


def _text_model(loaded: LoadedModel) -> TextModel:
    """Return the text of a model; with random weights, one that has no text."""
    if loaded.source is not None:
        return text_model_of(loaded.source)
    config = loaded.config
    return TextModel(
        name=config.name,
        digest="",
        max_model_tokens=config.max_model_tokens,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        tokenizer=_NoTokenizer(),
        new_detokenizer=lambda _shows_control, _marks: _NoText(),
        new_stop_matcher=_no_stops,
        max_prompt_chars=config.max_model_tokens,
        encode_chat=None,
        check_constraint=lambda _: 0,
        hidden_size=config.hidden_size,
    )


def _no_tokenizer() -> UsageError:
    return UsageError("load_format dummy loads no tokenizer; pass token ids instead of text", field="load_format")


def _no_stops(_stops: Sequence[str]) -> StopFinder:
    raise _no_tokenizer()


class _NoTokenizer:
    """Tokenizer of a model with random weights, which has no text."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        raise _no_tokenizer()

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""


class _NoText:
    """Detokenizer of a model with random weights."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""
