"""Constraints on the output of a request: a schema, a pattern, a list of choices or a grammar."""

from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.core.errors import InvalidRequest

MAX_CONSTRAINT_BYTES = 1 << 18
MAX_AFTER_CHARS = 64


class ConstraintKind(StrEnum):
    """Language in which a constraint is written."""

    JSON_SCHEMA = "json_schema"
    """JSON Schema, as JSON text."""
    JSON_OBJECT = "json_object"
    """Any JSON object; the source is empty."""
    REGEX = "regex"
    """Regular expression that the whole output matches, in the syntax of Rust's `regex` crate."""
    CHOICE = "choice"
    """JSON array of strings, one of which is the output."""
    GRAMMAR = "grammar"
    """Context-free grammar in Lark's syntax with llguidance's extensions."""
    STRUCTURAL_TAG = "structural_tag"
    """JSON object with `structures` and `triggers`: free text in which the parts between given tags follow a schema."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint of the output. It holds for generated tokens only, and its state depends on them alone, so that any
    worker can rebuild it from a sequence's tokens."""

    kind: ConstraintKind
    source: str
    after: str = ""
    """Text after which the constraint starts to apply, for example `</think>`; the text before it is free. Empty to
    apply it from the first token."""
    frame: str = ""
    """Grammar of the whole output, in which `@body` stands for the constraint; empty if it is the whole output. Such a
    grammar permits reasoning before the constrained text, or calls instead of it."""
    cost_bytes: int = field(default=0, compare=False, repr=False)
    """Memory of the compiled constraint in bytes, as measured when it was checked; 0 if unknown."""

    def __post_init__(self) -> None:
        """Check the sizes; the content is checked by `kvferry.text.grammar`.

        Raises:
            InvalidRequest: the source, the frame or `after` is too long, a `JSON_OBJECT` has a source, or there are
                both a frame and `after`.
        """
        for name, text in ((str(self.kind), self.source), ("frame", self.frame)):
            size = len(text.encode("utf-8", "surrogatepass"))
            if size > MAX_CONSTRAINT_BYTES:
                raise InvalidRequest(
                    f"{name} has {size} bytes; at most {MAX_CONSTRAINT_BYTES} are accepted",
                    field="constraint",
                    reason="CONSTRAINT_TOO_LARGE",
                )
        if self.frame and self.after:
            raise InvalidRequest("a constraint has either a frame or `after`, not both", field="constraint")
        if self.kind is ConstraintKind.JSON_OBJECT and self.source:
            raise InvalidRequest("json_object takes no schema; use json_schema", field="constraint")
        if self.kind is not ConstraintKind.JSON_OBJECT and not self.source:
            raise InvalidRequest(f"{self.kind} is empty; set its text, or leave it out", field="constraint")
        if len(self.after) > MAX_AFTER_CHARS:
            raise InvalidRequest(
                f"after has {len(self.after)} characters; at most {MAX_AFTER_CHARS} are accepted", field="constraint"
            )
