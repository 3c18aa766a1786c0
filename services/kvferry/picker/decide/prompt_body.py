"""What a request's body says about its prompt: model, text or tokens, expected output. No I/O.

The text is not what the model server tokenizes, but it begins alike for prompts that begin alike, which is enough to
find servers that have a prefix cached. A body that cannot be read is no error: it is routed by load.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from blake3 import blake3

from kvferry.gateway.decide.cache_map.feed_events import KEY_BITS

CHUNK_BYTES = 256
"""Bytes of text in one chunk, whose name depends on all text before it: about 64 tokens."""
BYTES_PER_TOKEN = 4
"""Bytes of text per token, for estimates; tokens that are given as numbers take as many bytes each."""
MAX_CHUNKS = 1024
"""Chunks that are named: the text after the first 256 KiB has no effect on the choice."""
_MAX_TEXT = MAX_CHUNKS * CHUNK_BYTES
_MAX_PARTS = 4096
"""Parts of a conversation that are read, which takes about 10 ms; later ones have no effect on the choice."""
_MAX_MODEL_CHARS = 256
_MAX_OUTPUT_TOKENS = 1 << 20
_PROMPTS = ("prompt", "input", "text", "input_ids", "token_ids", "prompt_token_ids", "query")
"""Fields with text or tokens, of completions, embeddings, responses, SGLang's and vLLM's own routes."""
_OUTPUT_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens", "max_new_tokens")


class BodyProblem(StrEnum):
    """Why a request is routed without its prompt."""

    NONE = "none"
    NO_BODY = "no_body"
    TOO_LARGE = "too_large"
    NOT_JSON = "not_json"
    NO_PROMPT = "no_prompt"


@dataclass(frozen=True, slots=True)
class PromptBody:
    """The part of a body on which the route depends."""

    model: str = ""
    """Empty if the body names none."""
    text: bytes = b""
    """The prompt, as text or tokens; empty if there is none."""
    salt: str = ""
    """Prompts of different salts share no cache."""
    max_output_tokens: int = 0
    """0 if the body has no limit."""
    problem: BodyProblem = BodyProblem.NONE
    num_bytes: int = 0
    """Size of the prompt: of `text`, or of the body if `text` is only its beginning."""

    @property
    def num_tokens(self) -> int:
        """Estimated number of prompt tokens, at least 1."""
        return max(1, self.num_bytes // BYTES_PER_TOKEN)


def read_body(body: bytes | None, *, is_cut: bool = False) -> PromptBody:
    """Read a JSON body of any of the routes for prompts.

    Args:
        body: the body; `None` if there is none or it is not known.
        is_cut: whether only its beginning is known.
    """
    if body is None or not body:
        return PromptBody(problem=BodyProblem.NO_BODY)
    if is_cut:
        return PromptBody(problem=BodyProblem.TOO_LARGE)
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError):
        return PromptBody(problem=BodyProblem.NOT_JSON)
    if not isinstance(found, dict):
        return PromptBody(problem=BodyProblem.NOT_JSON)
    try:
        text, is_whole = _text(found)
    except (RecursionError, msgspec.MsgspecError, OverflowError, TypeError, ValueError):
        text, is_whole = b"", True
    return PromptBody(
        model=_name(found.get("model")),
        text=text[:_MAX_TEXT],
        num_bytes=len(text) if is_whole else len(body),
        salt=_name(found.get("cache_salt")),
        max_output_tokens=_limit(found),
        problem=BodyProblem.NONE if text else BodyProblem.NO_PROMPT,
    )


def chunk_names(prompt: PromptBody) -> list[int]:
    """Return the names of the prompt's full chunks, in order, at most `MAX_CHUNKS`, as numbers of `KEY_BITS` bits."""
    last = _root(prompt)
    text, names = prompt.text, list[int]()
    for start in range(0, min(len(text) - CHUNK_BYTES + 1, MAX_CHUNKS * CHUNK_BYTES), CHUNK_BYTES):
        last = blake3(last + text[start : start + CHUNK_BYTES]).digest(16)
        names.append(int.from_bytes(last[:8]) >> (64 - KEY_BITS))
    return names


def affinity_key(prompt: PromptBody, names: Sequence[int], prefix_chunks: int) -> bytes:
    """Return the key by which equal beginnings meet: of the last of the first `prefix_chunks` chunks; of the whole text
    if it has no full chunk.

    Args:
        prompt: the prompt.
        names: its chunks.
        prefix_chunks: number of leading chunks that count.
    """
    if names:
        # All 64 bits, since a ring divides their whole range.
        return (names[min(prefix_chunks, len(names)) - 1] << (64 - KEY_BITS)).to_bytes(8)
    return blake3(_root(prompt) + prompt.text).digest(8)


def _root(prompt: PromptBody) -> bytes:
    return blake3("\x00".join((prompt.model, prompt.salt)).encode("utf-8", "surrogatepass")).digest(16)


def _text(body: Mapping[str, Any]) -> tuple[bytes, bool]:
    """Return the prompt in the order in which chat templates have it: tools, instructions, messages; and whether it is
    whole."""
    parts, size = list[bytes](), 0
    for part in _parts(body):
        parts.append(part)
        size += len(part) + 1
        if size > _MAX_TEXT or len(parts) >= _MAX_PARTS:
            return b"\x1e".join(parts), False
    return b"\x1e".join(parts), True


def _parts(body: Mapping[str, Any]) -> Iterator[bytes]:
    yield from _json_of(body.get("tools"))
    yield from _flat(body.get("system"))
    yield from _flat(body.get("instructions"))
    messages = body.get("messages")
    if isinstance(messages, list):
        for message in messages:
            yield from _message(message)
    else:
        yield from _prompt(next((body[name] for name in _PROMPTS if body.get(name) not in (None, "", [])), None))


def _prompt(given: object) -> Iterator[bytes]:
    """Yield a prompt: text, tokens, a list of either of which the first decides, or items of a conversation."""
    if not isinstance(given, list) or not given:
        yield from _flat(given)
    elif isinstance(given[0], int):
        yield _tokens(given)
    elif isinstance(given[0], Mapping):
        for item in given:
            yield from _message(item)
    else:
        yield from _prompt(given[0])


def _tokens(given: Sequence[object]) -> bytes:
    limit = MAX_CHUNKS * CHUNK_BYTES // BYTES_PER_TOKEN
    tokens = (token if isinstance(token, int) else 0 for token in given[:limit])
    return b"".join((token & 0xFFFFFFFF).to_bytes(4, "little") for token in tokens)


def _message(message: object) -> Iterator[bytes]:
    if not isinstance(message, Mapping):
        yield from _flat(message)
        return
    role = message.get("role")
    yield role.encode("utf-8", "surrogatepass") if isinstance(role, str) else b""
    yield from _flat(message.get("content"))
    rest = {name: value for name, value in message.items() if name not in ("role", "content")}
    if rest:
        yield msgspec.json.encode(rest)


def _flat(content: object) -> Iterator[bytes]:
    """Yield text, of the parts that have some; other parts, such as images, as JSON."""
    if isinstance(content, str):
        yield content.encode("utf-8", "surrogatepass")
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else part
            yield from _flat(text) if isinstance(text, str) else _json_of(part)
    else:
        yield from _json_of(content)


def _json_of(value: object) -> Iterator[bytes]:
    if value not in (None, [], {}):
        yield msgspec.json.encode(value)


def _name(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= _MAX_MODEL_CHARS else ""


def _limit(body: Mapping[str, Any]) -> int:
    for name in _OUTPUT_LIMITS:
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_OUTPUT_TOKENS:
            return value
    return 0
