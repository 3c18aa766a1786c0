"""Custom tools, whose input is free text, as functions, the only tools that models support.

The function has one argument, `input`. A `regex` grammar is enforced if a call must be made. Other grammars cannot be
enforced within the JSON text of a call: they are in the tool's description.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from kvferry.core.errors import InvalidRequest

_GROUP_MARK = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|[()]", re.DOTALL)
"""An escaped character, a class, or the mark of a group in a regular expression."""


@dataclass(frozen=True, slots=True)
class InputGrammar:
    """The grammar of a custom tool's input."""

    syntax: str
    """`lark` or `regex`."""
    definition: str

    @property
    def pattern(self) -> str | None:
        """Regular expression of the whole input; `None` with another syntax."""
        return f"^(?:{self.definition})$" if self.syntax == "regex" else None

    def check(self, where: str) -> None:
        """Check that the grammar describes the whole input.

        Args:
            where: path of the definition.

        Raises:
            InvalidRequest: a group of a regular expression is closed, but not opened.
        """
        if self.pattern is not None and _closes_early(self.definition):
            raise InvalidRequest(f"{where} has a `)` without its `(`; escape it as `\\)`", field=where)


def input_schema(grammar: InputGrammar | None) -> dict[str, Any]:
    """Return the schema of the function's arguments."""
    text: dict[str, Any] = {"type": "string"}
    if grammar is not None and grammar.pattern is not None:
        text["pattern"] = grammar.pattern
    return {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}


def described(description: str | None, grammar: InputGrammar | None) -> str | None:
    """Return the function's description: the tool's, and its grammar."""
    parts = [] if description is None else [description]
    if grammar is not None:
        parts.append(f"The input must match this {grammar.syntax} grammar:\n{grammar.definition}")
    return "\n\n".join(parts) or None


def is_unenforced(grammars: Iterable[InputGrammar | None], *, must_call: bool) -> bool:
    """Return whether a tool has a grammar that is only described: every one unless a call must be made.

    Args:
        grammars: grammar of each custom tool that is offered.
        must_call: whether the answer must be a call.
    """
    return any(grammar.pattern is None or not must_call for grammar in grammars if grammar is not None)


def arguments_of(text: str) -> str:
    """Return the arguments of the function, as JSON, for an input."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return the input in the arguments of a call.

    Args:
        arguments: JSON text; may be cut off. Text that is not an object with `input` is the input itself.
    """
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    is_cut = not arguments.rstrip().endswith("}")
    text = found.get("input", "" if is_cut else arguments) if isinstance(found, dict) else arguments
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


def _closes_early(pattern: str) -> bool:
    """Return whether a regular expression closes a group that it has not opened, and so would end the group that makes
    it match the whole input."""
    depth = 0
    for found in _GROUP_MARK.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth < 0:
            return True
    return False
