"""Requests of the offline API: prompts as tokens, completed sampling parameters, and the output of each request."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvferry.core.errors import InvalidRequest, UsageError
from kvferry.core.hashing import cache_scope
from kvferry.core.ids import AdapterId, RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.build import LoadedModel
from kvferry.engine.offline.beam_search import BeamOutput
from kvferry.engine.offline.completion import CompletionStream
from kvferry.engine.offline.embedding import pooling_request
from kvferry.engine.offline.prompts import Prompt
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.text.answers.answer import AnswerForm, AnswerSplitter, SplitOptions
from kvferry.text.requests.answer_forms import AnswerParsers, answer_form, opens_reasoning
from kvferry.text.requests.answer_rules import answer_rules
from kvferry.text.requests.beams import Beam, BeamParams
from kvferry.text.requests.output_text import OutputText
from kvferry.text.requests.pooling import PoolingParams
from kvferry.text.requests.prompt_parameters import check_output_length, kept_prompt, token_fields, with_bad_word_tokens
from kvferry.text.requests.stop_strings import StopMatcher
from kvferry.text.templates.chat_template import ChatTemplate, Message
from kvferry.text.tokenizing.detokenizer import Detokenizer
from kvferry.text.tokenizing.tokenizer import Tokenizer
from kvferry.text.tools.definitions import ToolUse
from kvferry.text.tools.history import call_input, check_calls, with_names
from kvferry.text.tools.inputs import calls_from_input, content_from_input
from kvferry.text.tools.prompt import encode_conversation


class RequestBuilder:
    """Builds the requests of one model."""

    def __init__(self, loaded: LoadedModel, *, max_model_tokens: int) -> None:
        """
        Args:
            loaded: the model.
            max_model_tokens: context length of the engine in tokens.
        """
        self._source = loaded.source
        self._config = loaded.config
        self._seed = loaded.settings.seed
        self._max_model_tokens = max_model_tokens
        self._numbers = itertools.count(1)
        self._form: AnswerForm | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model.

        Raises:
            UsageError: the weights are random.
        """
        if self._source is None:
            raise UsageError(
                "--load-format dummy loads no tokenizer; pass token ids instead of text",
                field="load_format",
            )
        return self._source.tokenizer

    def tokens(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a prompt.

        Raises:
            UsageError: the weights are random, but the prompt is a string.
        """
        return self.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt

    def beam_output(self, beam: Beam, params: BeamParams) -> BeamOutput:
        """Convert an ended beam to an output with its text."""
        assert beam.finish_reason is not None, "only an ended beam is an output"
        text = ""
        if self._source is not None:
            detokenizer = Detokenizer(self.tokenizer)
            text = detokenizer.feed(beam.tokens) + detokenizer.finish()
        score = beam.score(params.length_penalty)
        return BeamOutput(text, beam.tokens, beam.logprob, score, beam.finish_reason)

    def start(self, prompt: Prompt, sampling: SamplingParams, adapter: AdapterId | None = None) -> CompletionStream:
        """Build the request of a prompt, with an empty output.

        Args:
            prompt: a string or token ids.
            sampling: parameters of the completion.
            adapter: version of the adapter to use; `None` for the base model.

        Raises:
            InvalidRequest: a parameter does not fit the model, or conflicts with another parameter.
            UsageError: the weights are random, but the prompt is a string, or stop strings or bad words are set.
        """
        return self._start(self.tokens(prompt), sampling, adapter)

    def start_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        use: ToolUse,
        adapter: AdapterId | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> CompletionStream:
        """Build the request for the answer of a conversation; see `start`.

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
        template, tokenizer = self._template(), self.tokenizer
        given = [_template_message(message, f"messages.{number}") for number, message in enumerate(messages)]
        check_calls(given)
        ids = encode_conversation(template, tokenizer, with_names(given), use.offered, variables)
        if self._form is None:
            self._form = answer_form(template, tokenizer, AnswerParsers())
        form = self._form
        is_open = opens_reasoning(form, ids, Detokenizer(tokenizer, shows_control=False, marks=form.marks.by_token))
        sampling, split = answer_rules(form, use, sampling, is_open=is_open)
        return self._start(ids, sampling, adapter, None if split is None else form, split)

    def start_pooling(self, prompt: Prompt, params: PoolingParams) -> EngineRequest:
        """Build a pooling request.

        Raises:
            UsageError: the weights are random, but the prompt is a string.
        """
        return pooling_request(_request_id(next(self._numbers)), self.tokens(prompt), params)

    def _start(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        adapter: AdapterId | None,
        form: AnswerForm | None = None,
        split: SplitOptions | None = None,
    ) -> CompletionStream:
        number = next(self._numbers)
        params = sampling if sampling.seed is not None else replace(sampling, seed=self._seed + number)
        if params.bad_words:
            params = with_bad_word_tokens(params, self.tokenizer)
        self._check(params)
        kept = list(kept_prompt(token_ids, params, self._max_model_tokens))
        scope = cache_scope("", "", adapter)
        request = EngineRequest(_request_id(number), kept, params, tenant=scope, adapter=adapter)
        if self._source is None and not params.stop:
            return CompletionStream(request, None)
        detokenizer = Detokenizer(
            self.tokenizer,
            shows_control=not params.skip_special_tokens,
            marks={} if form is None else form.marks.by_token,
        )
        writer = OutputText(params, detokenizer, StopMatcher(params.stop) if params.stop else None)
        splitter = None if form is None or split is None else AnswerSplitter(form, split)
        return CompletionStream(request, writer, splitter)

    def _template(self) -> ChatTemplate:
        template = None if self._source is None else self._source.chat_template
        if template is None:
            raise UsageError("this model has no chat template; use generate", field="model")
        return template

    def _check(self, params: SamplingParams) -> None:
        check_output_length(params)
        for field, ids in token_fields(params).items():
            if ids and max(ids) >= self._config.vocab_size:
                raise InvalidRequest(
                    f"{field} has token id {max(ids)}; the vocabulary has ids 0 to {self._config.vocab_size - 1}",
                    field=field,
                )


def _request_id(number: int) -> RequestId:
    return RequestId(f"offline-{number}")


def _template_message(message: Message, where: str) -> dict[str, object]:
    """Return a caller's message in the form that chat templates expect."""
    calls = [call_input(call.call_id, call.name, call.arguments) for call in calls_from_input(message, where)]
    return {**message, "content": content_from_input(message, where), **({"tool_calls": calls} if calls else {})}
