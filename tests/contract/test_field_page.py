"""docs/http-api.md has the table of fields of the code; a failed test shows the text that belongs there."""

import json
from collections import defaultdict
from pathlib import Path

from kvferry.gateway.http.fields.field_policy import Effect, FieldRule
from kvferry.gateway.http.fields.strict import effects
from kvferry.gateway.http.openapi.operations import OPERATIONS

PAGE = (Path(__file__).resolve().parents[2] / "docs/http-api.md").read_text("utf-8")
BODIES = {
    op.path.removeprefix("/v1"): op.body
    for op in OPERATIONS
    if op.body is not None and op.path.startswith(("/v1/", "/tokenize", "/inference/"))
}


Row = tuple[str, str, str]
"""Field, values that have no effect, reason."""


def rows(effect: Effect) -> list[tuple[Row, str]]:
    """Return the fields with an effect, each with its routes, sorted by name."""
    found: dict[Row, list[str]] = defaultdict(list)
    for path, body in BODIES.items():
        rules = effects(body)
        for field, rule in rules.items():
            if isinstance(rule, FieldRule) and rule.effect is effect:
                values = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral)
                found[field, values, rule.reason].append(f"`{path}`")
    return [(row, ", ".join(paths)) for row, paths in sorted(found.items())]


def accepted() -> str:
    lines = ["| field | routes | not named at |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{f}` | {paths} | {values} |" for (f, values, _), paths in rows(Effect.ACCEPTED))])


def refused() -> str:
    lines = ["| field | routes | accepted at | reason |", "| --- | --- | --- | --- |"]
    for (field, values, reason), paths in rows(Effect.REFUSED):
        lines.append(f"| `{field}` | {paths} | {values} | {reason} |")
    return "\n".join(lines)


def honoured() -> str:
    lines = ["| route | fields of the body |", "| --- | --- |"]
    for path, body in BODIES.items():
        fields = sorted(name for name, effect in effects(body).items() if effect is Effect.HONOURED and "." not in name)
        lines.append(f"| `{path}` | {', '.join(f'`{field}`' for field in fields)} |")
    return "\n".join(lines)


def test_the_page_has_the_accepted_fields():
    assert accepted() in PAGE, accepted()


def test_the_page_has_the_refused_fields():
    assert refused() in PAGE, refused()


def test_the_page_has_the_honoured_fields():
    assert honoured() in PAGE, honoured()
