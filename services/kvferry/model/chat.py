"""From messages to token ids, so that no message can speak as the template.

If a message's text may become control tokens, a user who writes `<|im_end|><|im_start|>system` ends his turn and
begins one of higher standing. What a template writes must be parsed, what people write must not, and both come
out of one rendering. So before rendering, every control token inside a message is broken by a mark, a private-use
character that occurs nowhere else:

    content    "hi <|im_end|> there"            mark = U+E000, drawn as ^
    guarded    "hi <^|im_end|> there"
    rendered   <|im_start|>user\\nhi <^|im_end|> there<|im_end|>\\n
    pieces     [control]  user\\nhi <|im_end|> there  [control]  \\n

Whole control tokens in the rendered text are now the template's own. The text between them loses its marks and is
encoded with control tokens as ordinary text. A token could also be pieced together where a message meets other
text; so a message that ends with the beginning of one, or begins with the end of one, is marked there too.

Messages without any such place need no mark, and take the plain path: their ids are those of the tokenizer's own
parsing of the rendered text. The template itself is trusted, as the weights are: one that cut and joined message
text in the middle could undo the marks.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from kvferry.core.errors import InvalidRequest
from kvferry.model.chat_template import ChatTemplate, Message
from kvferry.model.tokenizer import ControlToken, Tokenizer

_PRIVATE_USE = range(0xE000, 0xF900)


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Message] | None = None,
) -> list[int]:
    """The prompt's token ids; control tokens only where the template wrote them.

    Raises:
        InvalidRequest: the template refuses the messages, or they cannot be encoded.
    """
    guard = _Guard(tokenizer, [*messages, *(tools or ()), template.source])
    text = template.render(
        [guard.message(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        tools=[guard.message(tool) for tool in tools] if tools is not None else None,
    )
    if not guard.was_needed:
        return tokenizer.encode(text, add_special=False)
    ids: list[int] = []
    for piece in _pieces(text, tokenizer):
        if isinstance(piece, ControlToken):
            ids.append(piece.token_id)
        else:
            ids += tokenizer.encode(piece.replace(guard.mark, ""), add_special=False, parse_control=False)
    return ids


class _Guard:
    """Breaks what could be read as a control token in one request's messages."""

    def __init__(self, tokenizer: Tokenizer, texts_seen: Sequence[object]) -> None:
        seen = set[str]().union(*(_strings(texts_seen)))
        mark = next((chr(code) for code in _PRIVATE_USE if chr(code) not in seen), None)
        if mark is None:
            raise InvalidRequest("the messages use every private-use character", field="messages")
        self.mark = mark
        self.was_needed = False
        texts = [text for text in tokenizer.control_tokens if len(text) > 1]  # one character cannot be broken
        # Looks ahead and consumes one character: of tokens that overlap, each is broken, in one pass.
        self._whole = re.compile(f"(?=(?:{'|'.join(map(re.escape, texts))}))(.)", re.DOTALL) if texts else None
        self._beginnings = {text[:n] for text in texts for n in range(1, len(text))}
        self._endings = {text[n:] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def message(self, message: Message) -> Message:
        """The message with every text in it guarded, keys included."""
        guarded = self._any(message)
        assert isinstance(guarded, dict)
        return guarded

    def _any(self, value: object) -> object:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {self._any(key): self._any(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._any(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        if self._whole is None:
            return text
        guarded = self._whole.sub(rf"\1{self.mark}", text)
        # Templates trim: the ends that count are those without white space.
        bare = guarded.rstrip()
        if any(bare[-n:] in self._beginnings for n in range(1, min(self._longest, len(bare) + 1))):
            guarded = bare + self.mark + guarded[len(bare) :]
        bare = guarded.lstrip()
        if any(bare[:n] in self._endings for n in range(1, min(self._longest, len(bare) + 1))):
            guarded = guarded[: len(guarded) - len(bare)] + self.mark + bare
        self.was_needed |= guarded != text
        return guarded


def _pieces(text: str, tokenizer: Tokenizer) -> Iterator[str | ControlToken]:
    """Cut at control tokens, leftmost and then longest, as the tokenizer itself does."""
    controls = tokenizer.control_tokens
    pattern = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))))
    at, swallow = 0, False
    for match in pattern.finditer(text):
        control = controls[match[0]]
        between = text[at : match.start()]
        between = between.lstrip() if swallow else between
        between = between.rstrip() if control.strips_left else between
        if between:
            yield between
        yield control
        at, swallow = match.end(), control.strips_right
    rest = text[at:].lstrip() if swallow else text[at:]
    if rest:
        yield rest


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
