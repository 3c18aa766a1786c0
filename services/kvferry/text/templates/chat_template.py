"""Renders messages to text with the Jinja chat template from the model's files.

The template is downloaded with the weights and therefore runs in a sandbox (`template_sandbox`): it cannot access
Python internals or change its arguments. Each rendering has a budget of work: `BASE_UNITS`, and `UNITS_PER_UNIT` times
the size of the messages. The budget holds for the whole rendering, for any combination of operations, and bounds

    time      about 10 ns per unit: 10 ms for a message of a few words, 30 ms for a request of 16 KiB
    memory    about 8 bytes per unit
    output    a character costs `OUTPUT_UNITS`, since it is tokenized later

Ordinary templates use a few percent of the budget. It depends on the messages only, so that whether a request is
accepted does not depend on where it is rendered or on the machine's speed. Options and extra functions match Hugging
Face transformers, with two exceptions: `safe` and `escape` return plain text, and `strftime_now` exists only for
templates that call it without testing whether it is defined, such as gpt-oss's. The others fall back to a fixed date,
so that prompts start with the same tokens every day.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from jinja2 import meta

from kvferry.core.errors import InvalidRequest, KvferryError, ModelFileError, shortened
from kvferry.text.templates.template_costs import BASE_UNITS, OUTPUT_UNITS, UNITS_PER_UNIT, Budget, message_of, size_of
from kvferry.text.templates.template_program import metered
from kvferry.text.templates.template_sandbox import BudgetContext, Sandbox

Message = Mapping[str, object]

_log = logging.getLogger(__name__)
_SYSTEM_ROLES = ("system", "developer")

_ASKS = re.compile(r"strftime_now\s+is\s+(?:not\s+)?defined")
MAX_SOURCE_CHARS = 256 << 10
"""Longest template; published ones have up to 20,000 characters."""


class ChatTemplate:
    """A compiled chat template. Immutable and thread-safe."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        pad_token: str = "",
        unk_token: str = "",
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """
        Args:
            source: the template.
            bos_token: text of the token that begins a sequence.
            eos_token: text of the token that ends it.
            pad_token: text of the padding token.
            unk_token: text of the token for unknown text.
            now: clock of the function `strftime_now`.

        Raises:
            ModelFileError: the template is too long. One that does not compile, or uses an unavailable feature, is
                logged and refuses messages; the model serves plain prompts.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelFileError(
                f"the model's chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are accepted"
            )
        self.source = source
        self.uses_tools = False
        """Whether the template reads the variable `tools`; otherwise tools have no effect on its text."""
        self._broken = ""
        environment = Sandbox(None if _ASKS.search(source) else now)
        environment.globals |= {
            "bos_token": bos_token,
            "eos_token": eos_token,
            "pad_token": pad_token,
            "unk_token": unk_token,
        }
        self._names = frozenset(environment.globals)
        try:
            parsed = environment.parse(source)
            self.uses_tools = "tools" in meta.find_undeclared_variables(parsed)
            self._template = environment.from_string(metered(parsed))
        except Exception as error:  # due to the template's syntax, deep nesting or long numbers
            self._broken = f"the model's chat template does not compile: {message_of(error).partition(chr(10))[0]}"
            _log.warning("%s; requests with messages are refused, and plain prompts are served", self._broken)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Render the prompt text.

        Args:
            messages: messages with `role` and `content`, oldest first; values as in JSON.
            add_generation_prompt: whether to append the start of the assistant's answer.
            tools: descriptions of the tools, for templates that support them.
            variables: further variables of the template, such as `enable_thinking`; values as in JSON. Variables that
                the template does not read have no effect.

        Raises:
            InvalidRequest: a variable has the name of one that the server sets, the template rejects the messages, or
                does more work than the budget allows.
        """
        if not messages:
            raise InvalidRequest("messages is empty; send at least one message", field="messages")
        if self._broken:
            raise InvalidRequest(f"{self._broken}; use a plain prompt", field="messages")
        systems = [message for message in messages if message.get("role") in _SYSTEM_ROLES]
        if len(systems) < 2 or not all(isinstance(message.get("content"), str) for message in systems):
            return self._render(messages, add_generation_prompt, tools, variables)
        return self._render_systems(messages, systems, add_generation_prompt, tools, variables)

    def _render_systems(
        self,
        messages: Sequence[Message],
        systems: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Message] | None,
        variables: Mapping[str, object] | None,
    ) -> str:
        """Render messages of which several are from the system or the developer. Some templates refuse all but the
        first or drop them: these get one message with the texts of all."""
        texts = [str(message["content"]).strip() for message in systems]
        try:
            text = self._render(messages, add_generation_prompt, tools, variables)
        except InvalidRequest:
            text = ""
        if text and all(each in text for each in texts):
            return text
        first = {**systems[0], "role": "system", "content": "\n\n".join(texts)}
        others = [message for message in messages if message.get("role") not in _SYSTEM_ROLES]
        text = self._render([first, *others], add_generation_prompt, tools, variables)
        if texts[0] in text and not all(each in text for each in texts):
            raise InvalidRequest(
                "the model's chat template drops one of several system messages; send one system message",
                field="messages",
            )
        return text

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Message] | None,
        variables: Mapping[str, object] | None,
    ) -> str:
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools}
        self._check_variables(variables or {}, given)
        pieces: list[str] = []
        try:
            budget = Budget(BASE_UNITS + UNITS_PER_UNIT * size_of([messages, tools, variables]))
            context = self._template.new_context({**(variables or {}), **given})
            assert isinstance(context, BudgetContext)
            context.budget = budget
            for piece in self._template.root_render_func(context):
                budget.spend(OUTPUT_UNITS * len(piece))
                pieces.append(piece)
        except KvferryError:
            raise
        except Exception as error:  # a template is a program and can raise any exception
            raise InvalidRequest(
                f"the chat template rejects these messages: {message_of(error)}", field="messages"
            ) from None
        return "".join(pieces)

    def _check_variables(self, variables: Mapping[str, object], given: Mapping[str, object]) -> None:
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            raise InvalidRequest(
                f"chat_template_kwargs must be an object of template variables, not {shortened(repr(variables))}",
                field="chat_template_kwargs",
            )
        for name in variables:
            if name in given or name in self._names:
                raise InvalidRequest(
                    f"chat_template_kwargs has {shortened(name)!r}, which is set by the server; leave it out",
                    field="chat_template_kwargs",
                )
