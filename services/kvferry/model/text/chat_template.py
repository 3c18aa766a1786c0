"""Renders messages to text with the Jinja chat template from the model's files.

The template is downloaded with the weights and therefore runs in a sandbox: it cannot access Python internals or change
its arguments, and its output is bounded. Options and extra functions are those of Hugging Face transformers.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.core.errors import InvalidRequest, KvferryError, ModelFileError

Message = Mapping[str, object]

MAX_OUTPUT_CHARS = 8 << 20


class ChatTemplate:
    """A compiled chat template. Immutable and thread-safe."""

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", max_output_chars: int = MAX_OUTPUT_CHARS
    ) -> None:
        """
        Raises:
            ModelFileError: the template does not compile.
        """
        self.source = source
        self._max_output_chars = max_output_chars
        environment = _Sandbox(max_output_chars)
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelFileError(f"the model's chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Message] | None = None,
    ) -> str:
        """Render the prompt text.

        Args:
            messages: messages with `role` and `content`, oldest first.
            add_generation_prompt: whether to append the start of the assistant's answer.
            tools: function descriptions, for templates that support them.

        Raises:
            InvalidRequest: the template rejects the messages, or its output exceeds `max_output_chars`.
        """
        if not messages:
            raise InvalidRequest("messages is empty; give at least one message", field="messages")
        pieces: list[str] = []
        room = self._max_output_chars
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=tools
            ):
                room -= len(piece)
                if room < 0:
                    raise InvalidRequest(
                        f"the chat template wrote more than {self._max_output_chars} characters", field="messages"
                    )
                pieces.append(piece)
        except KvferryError:
            raise
        except Exception as error:  # a template is a program and can raise any exception
            raise InvalidRequest(f"the chat template rejects these messages: {error}", field="messages") from error
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a limit on string repetition, which Jinja does not limit."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, max_chars: int) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self._max_chars = max_chars

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        if operator == "**":
            raise jinja2.exceptions.SecurityError("powers are not available")
        for sized, times in ((left, right), (right, left)):
            if (
                isinstance(sized, str | list | tuple)
                and isinstance(times, int)
                and len(sized) * times > self._max_chars
            ):
                raise jinja2.exceptions.SecurityError("a product is too long")
        product: object = super().call_binop(context, operator, left, right)
        return product


def _raise_exception(message: str) -> NoReturn:
    raise InvalidRequest(f"the chat template rejects these messages: {message}", field="messages")


def _tojson(value: object, indent: int | None = None) -> str:
    # Not Jinja's `tojson`, which escapes HTML; models were trained with plain JSON.
    return json.dumps(value, ensure_ascii=False, indent=indent)
