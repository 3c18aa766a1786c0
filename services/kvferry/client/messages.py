"""Builds the requests and results that both clients use."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from kvferry.core.errors import InvalidRequest, InvariantBroken
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams, ScoredToken
from kvferry.model.requests.output_text import StopReason
from kvferry.rpc import wire
from kvferry.rpc.text.text_stream import TextChunk, Usage
from kvferry.rpc.text.token_source import Timing
from kvferry.v1 import common_pb2, inference_pb2

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Plain text, token ids, or a conversation: mappings with `role` and `content`."""

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete sample: text, tokens, finish reason, usage and timing."""

    index: int
    """Index of the sample, 0 to n - 1."""
    text: str
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    stop_reason: StopReason = None
    """The stop string or stop token id that ended the sample; `None` if neither did."""
    prompt_logprobs: tuple[ScoredToken, ...] | None = None
    """Log-probabilities of the prompt's tokens from the second one on; `None` unless requested."""

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the generated tokens."""
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model's name, digest, context length and vocabulary."""

    model: str
    digest: str
    max_model_tokens: int
    """Context length in tokens, prompt and output."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def generate_request(
    prompt: Prompt, sampling: SamplingParams | None, n: int, model: str, request_id: str
) -> inference_pb2.GenerateRequest:
    """Build the message for `Inference.Generate`.

    Raises:
        InvalidRequest: the prompt is empty, so it is unknown whether it has tokens or messages.
    """
    request = inference_pb2.GenerateRequest(model=model, request_id=request_id, n=n)
    if sampling is not None:
        request.sampling.CopyFrom(wire.sampling_to_wire(sampling))
    if isinstance(prompt, str):
        request.text = prompt
    elif not prompt:
        raise InvalidRequest("the prompt is empty; give at least one token or message", field="prompt")
    elif isinstance(prompt[0], int):
        request.tokens.CopyFrom(common_pb2.TokenIds(ids=cast("Sequence[int]", prompt)))
    else:
        request.chat.CopyFrom(chat_to_wire(cast("Sequence[Mapping[str, str]]", prompt)))
    return request


def chat_to_wire(messages: Sequence[Mapping[str, str]]) -> inference_pb2.Chat:
    """Convert a conversation to a `Chat` message."""
    return inference_pb2.Chat(
        messages=[inference_pb2.ChatMessage(role=m["role"], content=m["content"]) for m in messages]
    )


def tokenize_request(prompt: str | Sequence[Mapping[str, str]], model: str) -> inference_pb2.TokenizeRequest:
    """Build the message for `Inference.Tokenize`."""
    if isinstance(prompt, str):
        return inference_pb2.TokenizeRequest(model=model, text=prompt)
    return inference_pb2.TokenizeRequest(model=model, chat=chat_to_wire(prompt))


def model_info(response: inference_pb2.GetModelInfoResponse) -> ModelInfo:
    """Convert the response of `Inference.GetModelInfo`."""
    return ModelInfo(
        model=response.model,
        digest=response.digest,
        max_model_tokens=response.max_model_tokens,
        vocab_size=response.vocab_size,
        eos_token_ids=tuple(response.eos_token_ids),
    )


def metadata(api_key: str | None) -> Metadata:
    """Return the metadata sent with every call: the API key, if there is one."""
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def gather(chunks: Iterable[TextChunk]) -> list[Completion]:
    """Assemble complete samples from their chunks, ordered by index.

    Raises:
        InvariantBroken: a sample's last chunk is missing.
    """
    samples: dict[int, list[TextChunk]] = {}
    for chunk in chunks:
        samples.setdefault(chunk.index, []).append(chunk)
    return [_whole(samples[index]) for index in sorted(samples)]


def _whole(chunks: Sequence[TextChunk]) -> Completion:
    last = chunks[-1]
    if last.finish_reason is None or last.usage is None or last.timing is None:
        raise InvariantBroken(f"the stream ended before sample {last.index} had a finish reason")
    return Completion(
        index=last.index,
        text="".join(chunk.text for chunk in chunks),
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        finish_reason=last.finish_reason,
        usage=last.usage,
        timing=last.timing,
        stop_reason=last.stop_reason,
        prompt_logprobs=chunks[0].prompt_logprobs,
    )
