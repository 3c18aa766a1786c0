"""The generated part of docs/configuration.md: all settings by topic, from the product's own table."""

from collections.abc import Iterator, Mapping, Sequence

from kvferry.cli.operator_settings import OPERATOR, OPERATOR_CHECK
from kvferry.cli.options import bound
from kvferry.core.settings import processes
from kvferry.core.settings.picker import PICKER
from kvferry.core.settings.setting import Setting
from kvferry.core.settings.topics import TOPICS

_COMMANDS: Mapping[str, Sequence[Setting]] = {
    "up": processes.UP,
    "worker": processes.WORKER,
    "gateway": processes.GATEWAY,
    "picker": PICKER,
    "demo": processes.STACK,
    "bench": processes.BENCH,
    "doctor": processes.DOCTOR,
    "explain": processes.CLIENT,
    "chat": processes.CLIENT,
    "operator run": OPERATOR,
    "operator check": OPERATOR_CHECK,
}


def settings() -> str:
    """Return a table of settings for each topic."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    for topic, names in TOPICS.items():
        rows = [row for name in names for row in _rows(name)]
        yield from ("", f"### {topic}", "", "| setting | value | default | commands | meaning |")
        yield from ("| --- | --- | --- | --- | --- |", *rows)


def _rows(name: str) -> Iterator[str]:
    """Yield a row for each meaning of a name; commands with one meaning share a row."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for command, table in _COMMANDS.items():
        for setting in map(bound, (*table, *processes.LOGGING)):
            if setting.name == name:
                shown = "" if setting.default in (None, "", ()) else f"`{setting.shown(setting.default)}`"
                value = " ".join(f"`{one}`" for one in setting.choices) or f"`{setting.parse.metavar}`"
                value = "secret, no flag" if setting.is_secret else value
                found.setdefault((value, shown, setting.help), []).append(command)
    for (value, shown, about), commands in found.items():
        used = "all" if len(commands) == len(_COMMANDS) else ", ".join(commands)
        cells = (f"`{name}`", value, shown, used, about.replace("<", "&lt;"))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
