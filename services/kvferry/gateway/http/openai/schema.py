"""The implemented fields of OpenAI's requests, with vLLM's extensions; `fields.field_policy` has the others."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import Field, PlainValidator, WithJsonSchema

from kvferry.core.errors import InvalidRequest
from kvferry.core.inference.beams import MAX_WIDTH, BeamParams
from kvferry.core.inference.tools import ToolUse
from kvferry.core.limits import MAX_CACHE_SALT_CHARS
from kvferry.core.sampling import MAX_OUTPUT_TOKENS, RANGES, Range, SamplingParams
from kvferry.gateway.http.fields import field_policy
from kvferry.gateway.http.fields.cache_fields import CacheBreakpoint, CacheControl, CacheHintFields
from kvferry.gateway.http.fields.field_policy import Rules
from kvferry.gateway.http.fields.request_fields import ConstraintFields, Message
from kvferry.gateway.http.fields.strict import (
    MAX_FIELDS,
    Priority,
    Prompt,
    SamplingFields,
    Strict,
    check_prompt,
    check_sizes,
    json_object,
    parse_fields,
)
from kvferry.gateway.http.fields.tool_fields import (
    ChatTool,
    ToolChoice,
    custom_places,
    has_described_format,
    in_custom_tools,
    tool_use,
)
from kvferry.rpc.wire import MAX_SAMPLES
from kvferry.text.tools.conversations import PromptEnd

_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions; chat has no default."""

_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}


_NOT_WITH_BEAMS = ("stream", "echo", "thinking_token_budget")
"""Fields that have no meaning for the outputs of a beam search, besides those that `check_beam_sampling` refuses."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""How much a model reasons; `none` turns reasoning off in templates that read `enable_thinking`."""


class StreamOptions(Strict):
    """OpenAI's `stream_options`."""

    RULES: ClassVar[Rules] = field_policy.STREAM_OPTIONS

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether each chunk has the usage so far, if `include_usage` is set; named as in vLLM."""


Budget = Annotated[int, Field(ge=0, le=MAX_OUTPUT_TOKENS)]
"""Maximum number of tokens of the reasoning."""


class ReasoningOptions(Strict):
    """The object form of `reasoning_effort`."""

    RULES: ClassVar[Rules] = field_policy.REASONING

    effort: Effort | None = None
    max_tokens: Budget | None = None


class GenerationFields(SamplingFields):
    """The fields of all generating requests that change which tokens are generated, named as in OpenAI's and vLLM's
    APIs."""

    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], WithJsonSchema(_BIAS_SCHEMA)] | None = None
    # Extensions to OpenAI's API, named as in vLLM.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    typical_p: float | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    # A kvferry-specific extension.
    speculation: bool | None = None


class _Common(ConstraintFields, CacheHintFields, GenerationFields):
    model: str | None = None
    """Model name; `None` selects the served model. OpenAI requires this field; a gateway serves one model only."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extensions to OpenAI's API, named as in vLLM.
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    """Requests with unequal salts share no KV; named as in vLLM."""
    priority: Priority = 0
    return_token_ids: bool | None = None
    """Whether the response has the token ids of prompts and outputs."""
    use_beam_search: bool | None = None
    """Whether to return the best outputs of a beam search, instead of samples."""
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    """Number of samples that are generated per prompt, of which the best `n` are returned, or number of beams."""
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples per prompt: `n`, 1 by default."""
        return 1 if self.n is None else self.n

    @property
    def num_generated(self) -> int:
        """Number of samples or beams that are generated per prompt, of which the best `n` are returned."""
        return self.num_samples if self.best_of is None else self.best_of

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    def beam_params(self, max_tokens: int | None) -> BeamParams | None:
        """Return the parameters of a beam search; `None` if the request samples.

        Args:
            max_tokens: maximum number of output tokens; `None` for as many as fit in the context.

        Raises:
            InvalidRequest: a field is out of range, or cannot be combined with a beam search.
        """
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) is not None:
                    raise InvalidRequest(f"{name} needs use_beam_search to be true", field=name)
            return None
        for name in _NOT_WITH_BEAMS:
            if getattr(self, name, None):
                raise InvalidRequest(f"{name} cannot be combined with use_beam_search; leave it out", field=name)
        given = {
            "max_tokens": MAX_OUTPUT_TOKENS if max_tokens is None else max_tokens,
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
            "ignore_eos": self.ignore_eos,
        }
        if self.num_generated > MAX_WIDTH:
            field = "n" if self.best_of is None else "best_of"
            raise InvalidRequest(
                f"{field} must be a whole number from 1 to {MAX_WIDTH} with use_beam_search, not {self.num_generated}",
                field=field,
            )
        return BeamParams(self.num_generated, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Return the request's sampling parameters.

        Raises:
            InvalidRequest: a field is out of range; the error contains its name.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "min_tokens": self.min_tokens,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": self.ignore_eos,
            "typical_p": self.typical_p,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens,
            "speculation": self.speculation,
        }
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self.seed,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_token_keys(self.logit_bias or {}),
            logprobs=logprobs,
            constraint=self.constraint()[1],
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            prompt_logprobs=self.prompt_logprobs,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )

    def check_best_of(self) -> None:
        """Check that `best_of` is at least `n`.

        Raises:
            InvalidRequest: `best_of` is less than `n`.
        """
        if self.num_generated < self.num_samples:
            raise InvalidRequest(
                f"best_of is {self.best_of}, which is less than n={self.num_samples}; set best_of to at least n",
                field="best_of",
            )

    def check_stream_options(self) -> None:
        """Check the options that depend on `stream`.

        Raises:
            InvalidRequest: `stream_options` is set without `stream`, or `prompt_logprobs` with `stream`.
        """
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs are not sent in a stream; set stream to false, or leave prompt_logprobs out",
                field="prompt_logprobs",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", field="stream_options")


class ChatRequest(_Common):
    """Request body of POST /v1/chat/completions."""

    RULES: ClassVar[Rules] = field_policy.CHAT
    LIMITS: ClassVar[Mapping[str, Range]] = {
        **RANGES,
        "max_completion_tokens": RANGES["max_tokens"],
        "top_logprobs": RANGES["logprobs"],
    }

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    cache_control: CacheControl | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[ChatTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    # Extensions to OpenAI's API, named as in vLLM.
    thinking_token_budget: Budget | None = None
    """Maximum number of tokens of the reasoning; the answer then begins."""
    include_reasoning: bool | None = None
    """Whether the response has the reasoning, true by default."""
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_FIELDS)] | None = None
    """Further variables of the chat template, such as `enable_thinking`."""
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """Variable of the chat template: documents to answer from."""
    stop_in_reasoning: bool | None = None
    """Whether stop strings end the reasoning too, false by default."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the start of the assistant's answer, true by default."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last message."""

    def to_tool_use(self) -> ToolUse:
        """Convert the tools and the choice of a tool.

        Raises:
            InvalidRequest: the tools exceed a limit, or contradict the choice.
        """
        try:
            return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        except InvalidRequest as error:
            raise in_custom_tools(error, custom_places(self.tools)) from None

    def described_formats(self) -> list[str]:
        """Return the name of the format of custom tools, for the header of ignored fields, if a grammar is described to
        the model, but not enforced."""
        return ["tools.custom.format"] if has_described_format(self.tools, self.tool_choice) else []

    def max_reasoning_tokens(self) -> int | None:
        """Return the maximum number of tokens of the reasoning; `None` for no limit.

        Raises:
            InvalidRequest: `thinking_token_budget` and `reasoning.max_tokens` differ.
        """
        budgets = {self.thinking_token_budget, None if self.reasoning is None else self.reasoning.max_tokens} - {None}
        if len(budgets) > 1:
            raise InvalidRequest(
                f"thinking_token_budget is {self.thinking_token_budget} and reasoning.max_tokens another one; set only "
                "one",
                field="thinking_token_budget",
            )
        return next(iter(budgets), None)

    def template_variables(self) -> dict[str, Any]:
        """Return the further variables of the chat template: `chat_template_kwargs` and those of other fields.

        Raises:
            InvalidRequest: `reasoning_effort` and `reasoning` differ.
        """
        efforts = {self.reasoning_effort, None if self.reasoning is None else self.reasoning.effort} - {None}
        if len(efforts) > 1:
            raise InvalidRequest(
                f"reasoning_effort is {self.reasoning_effort} and reasoning.effort another one; set only one",
                field="reasoning_effort",
            )
        found: dict[str, Any] = {}
        for effort in efforts:
            found = {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
        if self.documents is not None:
            found["documents"] = self.documents
        return {**found, **(self.chat_template_kwargs or {})}

    def prompt_end(self) -> PromptEnd:
        """Return how the prompt ends.

        Raises:
            InvalidRequest: the last message cannot be continued.
        """
        if not self.continue_final_message:
            return PromptEnd.MESSAGE if self.add_generation_prompt is False else PromptEnd.ANSWER
        if self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt cannot both be true; set one of them to false",
                field="continue_final_message",
            )
        last = self.messages[-1]
        if last.role != "assistant" or last.tool_calls or not last.content:
            raise InvalidRequest(
                "continue_final_message needs a last message of role assistant with text and without tool_calls",
                field="continue_final_message",
            )
        return PromptEnd.OPEN

    def cache_marks(self) -> list[CacheControl | CacheBreakpoint | None]:
        """Return the marks of messages and tools that ask the cache to keep the prompt."""
        of_messages = [mark for message in self.messages for mark in message.cache_marks]
        return [self.cache_control, *of_messages, *(tool.cache_control for tool in self.tools or ())]

    def template_inputs(self) -> list[dict[str, object]]:
        """Return the messages in the form that chat templates expect.

        Raises:
            InvalidRequest: a message has a field that does not belong to its role, or lacks one.
        """
        return [message.as_template_input(f"messages.{number}") for number, message in enumerate(self.messages)]

    def to_sampling(self) -> SamplingParams:
        """Convert the fields to sampling parameters.

        Raises:
            InvalidRequest: fields are inconsistent or out of range.
        """
        self.check_stream_options()
        self.check_best_of()
        if self.best_of is not None and not self.use_beam_search:
            raise InvalidRequest(
                "best_of of a conversation needs use_beam_search to be true; use n for samples", field="best_of"
            )
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; they are "
                "synonyms, so set only one",
                field="max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        try:
            return self.sampling(next(iter(both), None), (self.top_logprobs or 0) if self.logprobs else None)
        except InvalidRequest as error:
            raise renamed(error, names) from None


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return an error with the name that a field has in the request's API; `names` has these by field."""
    name = names.get(error.field or "")
    if name is None or error.field is None:
        return error
    return type(error)(error.message.replace(error.field, name, 1), field=name, reason=error.reason)


class CompletionRequest(_Common):
    """Request body of POST /v1/completions."""

    RULES: ClassVar[Rules] = field_policy.COMPLETION
    LIMITS: ClassVar[Mapping[str, Range]] = {**RANGES, "max_tokens": replace(RANGES["max_tokens"], low=0)}
    """As in `SamplingParams`, except that 0 is accepted with `echo`."""

    prompt: Annotated[Prompt, PlainValidator(check_prompt, json_schema_input_type=Prompt)]
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def is_echo_alone(self) -> bool:
        """Whether the response has the prompt and no output, as needed to evaluate a model's log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def to_sampling(self) -> SamplingParams:
        """Convert the fields to sampling parameters.

        Raises:
            InvalidRequest: fields are inconsistent or out of range.
        """
        self.check_stream_options()
        self.check_best_of()
        if self.stream and self.num_generated > self.num_samples:
            raise InvalidRequest(
                f"best_of is {self.best_of}, but n={self.num_samples}; a stream sends every sample and cannot choose "
                "the best: set stream to false, or best_of to n",
                field="best_of",
            )
        limit = _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if self.is_echo_alone:
            limit = 1  # a sample has at least one token; the response leaves it out
        made = self.sampling(limit, self.logprobs)
        if not self.echo or self.logprobs is None:
            return made
        return replace(made, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))

    def prompts(self, limit: int) -> Sequence[str | list[int]]:
        """Return the prompts, each as text or token ids.

        Raises:
            InvalidRequest: the request has no prompts, or more than `limit`.
        """
        prompt = self.prompt
        several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
        found = cast("Sequence[str | list[int]]", prompt if several else [prompt])
        if not 0 < len(found) <= limit:
            raise InvalidRequest(f"prompt has {len(found)} prompts; it must have 1 to {limit}", field="prompt")
        return found


R = TypeVar("R", ChatRequest, CompletionRequest)


def parse(kind: type[R], body: bytes, *, is_strict: bool = False) -> R:
    """Parse and validate a request from a JSON body.

    Args:
        kind: type of the request.
        body: JSON text in UTF-8.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest: a field is invalid or refused; the error describes the first such field.
    """
    fields = json_object(body)
    check_sizes(fields)
    return parse_fields(kind, fields, is_strict=is_strict)


_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
"""Canonical decimal form of a token id; the length limit bounds parsing time."""


def _token_keys(bias: Mapping[str, float]) -> dict[int, float]:
    for key in bias:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(
                "logit_bias has a key that is not a token id; use decimal digits without leading zeros",
                field="logit_bias",
            )
    return {int(key): value for key, value in bias.items()}
