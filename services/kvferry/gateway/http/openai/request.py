"""Converts a request's JSON body to sampling parameters and token ids. Large bodies are read in the text process."""

from dataclasses import dataclass

from kvferry.core.errors import InvalidRequest, UnknownModel
from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.tools import ToolUse
from kvferry.core.sampling import SamplingParams
from kvferry.gateway.http.openai.schema import ChatRequest, CompletionRequest, parse
from kvferry.serving import prompts
from kvferry.serving.chats import prepare_chat
from kvferry.serving.text_model import TextModel
from kvferry.text.answers.answer import SplitOptions
from kvferry.text.requests.prompt_parameters import with_bad_word_tokens

MAX_REQUEST_SAMPLES = 128
"""Maximum number of samples per request, over all its prompts."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request whose fields are valid, with its prompts as token ids."""

    model: str
    """The requested model or adapter; empty for the model."""
    prompts: tuple[list[int], ...]
    sampling: SamplingParams
    num_samples: int
    """Number of samples per prompt."""
    stream: bool
    include_usage: bool
    cache_salt: str
    priority: int
    constraint_field: str
    """Field of the request that sets the constraint of `sampling`; empty if the output is free."""
    num_choices: int | None = None
    """Number of samples per prompt that are returned, the ones with the highest log-probability; `None` for all."""
    echoes: tuple[str | None, ...] = ()
    """Texts of the prompts, `None` for a prompt of token ids; empty if the response does not repeat the prompts."""
    prompt_logprobs: int | None = None
    """The request's `prompt_logprobs`; `sampling` may have a larger number, for the log-probabilities of an echo."""
    is_echo_alone: bool = False
    """Whether the response leaves out the output."""
    split: SplitOptions | None = None
    """Options for splitting answers into reasoning, content and tool calls; `None` if they are not split."""
    beams: BeamParams | None = None
    """Parameters of a beam search, whose best `num_samples` outputs are returned; `None` if outputs are sampled."""


def read_chat(model: TextModel, body: bytes) -> ReadRequest:
    """Parse the body of a chat request, render its template and tokenize the prompt.

    Args:
        model: the served model.
        body: JSON body of the request.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    request = parse(ChatRequest, body)
    return read_conversation(model, request, request.to_tool_use(), request.constraint()[0] or "tools")


def read_conversation(model: TextModel, request: ChatRequest, use: ToolUse, constraint_field: str) -> ReadRequest:
    """Render the template of a valid chat request and tokenize the prompt.

    Args:
        model: the served model: tokenizer and chat template.
        request: a valid chat request.
        use: the tools that are offered.
        constraint_field: field of the client's request that sets the constraint, for errors.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    name = _model_name(model, request.model)
    sampling = with_bad_word_tokens(request.to_sampling(), model.tokenizer)
    chat = prepare_chat(model, request.template_inputs(), use, sampling, request.chat_template_kwargs)
    return ReadRequest(
        model=name,
        prompts=(list(chat.token_ids),),
        sampling=chat.sampling,
        num_samples=request.num_samples,
        stream=bool(request.stream),
        include_usage=request.include_usage,
        cache_salt=request.cache_salt or "",
        priority=request.priority,
        constraint_field=constraint_field,
        prompt_logprobs=request.prompt_logprobs,
        split=chat.split,
        beams=request.beam_params(sampling.max_tokens),
    )


def read_completion(model: TextModel, body: bytes, max_prompts: int) -> ReadRequest:
    """Parse the body of a completions request and tokenize its prompts.

    Args:
        model: the served model.
        body: JSON body of the request.
        max_prompts: maximum number of prompts in the request.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    request = parse(CompletionRequest, body)
    name = _model_name(model, request.model)
    sampling = with_bad_word_tokens(request.to_sampling(), model.tokenizer)
    found = request.prompts(max_prompts)
    beams = request.beam_params(request.max_tokens)
    num_samples = len(found) * request.num_generated
    if num_samples > MAX_REQUEST_SAMPLES:
        field = "n" if request.best_of is None else "best_of"
        raise InvalidRequest(
            f"{len(found)} prompts with {field}={request.num_generated} need {num_samples} samples; at most "
            f"{MAX_REQUEST_SAMPLES} are accepted in one request",
            field=field,
        )
    encoded = tuple(prompts.encode_text(model, prompt) if isinstance(prompt, str) else prompt for prompt in found)
    for ids in encoded if sampling.truncate_prompt_tokens is None else ():
        prompts.check_num_tokens(model, len(ids))
    return ReadRequest(
        model=name,
        prompts=encoded,
        sampling=sampling,
        num_samples=request.num_generated if beams is None else request.num_samples,
        stream=bool(request.stream),
        include_usage=request.include_usage,
        cache_salt=request.cache_salt or "",
        priority=request.priority,
        constraint_field=request.constraint()[0],
        num_choices=request.num_samples if request.num_generated > request.num_samples and beams is None else None,
        echoes=tuple(prompt if isinstance(prompt, str) else None for prompt in found) if request.echo else (),
        prompt_logprobs=request.prompt_logprobs,
        is_echo_alone=request.is_echo_alone,
        beams=beams,
    )


def _model_name(model: TextModel, name: str | None) -> str:
    if name == "":  # an empty name means an absent field in gRPC, but in HTTP the client sent it
        raise UnknownModel(f"model '' is not served here; use {model.name!r}", field="model")
    return name or ""
