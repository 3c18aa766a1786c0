"""A text model without weights or files: each token is a byte, so that tests can read token ids as text."""

import codecs
import json
from collections.abc import Mapping, Sequence

from kvferry.core.constraint import Constraint
from kvferry.core.errors import InvalidRequest
from kvferry.core.inference.tools import Tool
from kvferry.serving.text_model import ChatMessages, TextModel
from kvferry.text.answers.answer import AnswerForm
from kvferry.text.answers.registry import CallFormat
from kvferry.text.tools.conversations import PromptEnd, as_text

EOS = 256
BOS = 257
VOCAB_SIZE = 258
HIDDEN_SIZE = 8
NAME = "bytes"


class ByteTokenizer:
    """UTF-8 bytes as token ids 0 to 255."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return [BOS] * add_special + list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < EOS).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < EOS else b""


class ByteDetokenizer:
    """Detokenizer based on Python's incremental UTF-8 decoder; the text of the end-of-sequence token, if control tokens
    are shown, is `<eos>`."""

    def __init__(self, shows_control: bool = False, _marks: Mapping[int, str] | None = None) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._shows_control = shows_control

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._feed_one, token_ids))

    def _feed_one(self, token: int) -> str:
        if token < EOS:
            return self._decoder.decode(bytes([token]))
        return "<eos>" if self._shows_control and token == EOS else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class BufferedStopMatcher:
    """Stop matcher that searches the whole text in every call: slow but simple."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._text = ""
        self._shown = 0
        self._ignored = 0
        self.matched: str | None = None

    def feed(self, text: str, *, may_match: bool = True) -> str:
        self._text += text
        if not may_match:
            self._ignored = len(self._text)
        ends = range(self._ignored + 1, len(self._text) + 1)
        found = [
            (end, end - len(stop), stop) for end in ends for stop in self._stops if self._text[:end].endswith(stop)
        ]
        _, end, self.matched = min(found) if found else (0, len(self._text) - self._held(), None)
        shown = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return shown

    def finish(self) -> str:
        return self._text[self._shown :]

    def _held(self) -> int:
        prefixes = (stop[:size] for stop in self._stops for size in range(1, len(stop)))
        return max((len(prefix) for prefix in prefixes if self._text.endswith(prefix)), default=0)


def encode_chat(
    messages: ChatMessages,
    tools: Sequence[Tool],
    variables: Mapping[str, object],
    end: PromptEnd = PromptEnd.ANSWER,
) -> list[int]:
    """Encode each message as `<role>content`, or `<role name>content`, then the variables as JSON, if there are any,
    and the end of the prompt; tools as text, see `as_text`."""
    messages = as_text(messages, tools)
    for message in messages:
        if message["role"] not in ("system", "user", "assistant"):
            raise InvalidRequest(f"role {message['role']!r} is not known to the template", field="messages")
    names = [f" {message['name']}" if message.get("name") else "" for message in messages]
    text = "".join(
        f"<{message['role']}{name}>{message['content']}" for message, name in zip(messages, names, strict=True)
    )
    last = {PromptEnd.ANSWER: "<assistant>", PromptEnd.MESSAGE: "", PromptEnd.OPEN: ""}[end]
    return list(f"{text}{json.dumps(variables) if variables else ''}{last}".encode())


def check_constraint(constraint: Constraint) -> int:
    """Reject constraints that contain `unsupported`; return the memory of others."""
    if "unsupported" in constraint.source:
        raise InvalidRequest("the constraint cannot be used: unsupported", field="constraint")
    return 1000 + len(constraint.source)


def byte_model(
    max_model_tokens: int = 512, call_format: CallFormat = CallFormat.HERMES, *, has_reasoning: bool = False
) -> TextModel:
    """Create a byte-level `TextModel`; its chat template rejects unknown roles."""
    return TextModel(
        name=NAME,
        digest="00" * 32,
        max_model_tokens=max_model_tokens,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        tokenizer=ByteTokenizer(),
        new_detokenizer=ByteDetokenizer,
        new_stop_matcher=BufferedStopMatcher,
        max_prompt_chars=max_model_tokens
        * 64,  # greater than the number of tokens, so that tests reach the check after encoding
        encode_chat=encode_chat,
        check_constraint=check_constraint,
        answer_form=AnswerForm(call_format, has_reasoning),
        hidden_size=HIDDEN_SIZE,
    )
