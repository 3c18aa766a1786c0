"""A text model without weights or files: a token is a byte, so that a test can read token ids as text."""

import codecs
from collections.abc import Sequence

from kvferry.core.errors import InvalidRequest
from kvferry.rpc.text_model import ChatMessages, TextModel

EOS = 256
BOS = 257
VOCAB_SIZE = 258
NAME = "bytes"


class ByteTokenizer:
    """UTF-8 bytes as token ids 0 to 255."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return [BOS] * add_special + list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < EOS).decode(errors="replace")


class ByteDetokenizer:
    """Python's own incremental UTF-8 decoder."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token for token in token_ids if token < EOS))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class BufferedStopMatcher:
    """Keeps the whole text and searches it anew each time: slow and obvious."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._text = ""
        self._shown = 0

    def feed(self, text: str) -> tuple[str, bool]:
        self._text += text
        found = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        end = min(found, default=0) if found else len(self._text) - self._held()
        shown = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return shown, bool(found)

    def finish(self) -> str:
        return self._text[self._shown :]

    def _held(self) -> int:
        prefixes = (stop[:size] for stop in self._stops for size in range(1, len(stop)))
        return max((len(prefix) for prefix in prefixes if self._text.endswith(prefix)), default=0)


def render_chat(messages: ChatMessages) -> str:
    """`<role>content` for each, then the assistant's turn."""
    for message in messages:
        if message["role"] not in ("system", "user", "assistant"):
            raise InvalidRequest(f"role {message['role']!r} is not known to the template", field="messages")
    return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


def byte_model(max_model_tokens: int = 512) -> TextModel:
    """The model; its chat template refuses unknown roles."""
    return TextModel(
        name=NAME,
        digest="00" * 32,
        max_model_tokens=max_model_tokens,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        tokenizer=ByteTokenizer(),
        new_detokenizer=ByteDetokenizer,
        new_stop_matcher=BufferedStopMatcher,
        render_chat=render_chat,
    )
