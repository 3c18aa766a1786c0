"""Printed settings are a file that has the same meaning, without secrets."""

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.process.toml_text import parse_toml
from kvferry.core.settings import processes
from kvferry.core.settings.every_name import EVERY_NAME
from kvferry.core.settings.parsers import Parser, boolean, seconds, size_or_auto, whole_or_auto
from kvferry.core.settings.resolve import resolve
from kvferry.core.settings.setting import Setting
from kvferry.core.settings.settings_file import settings_file
from kvferry.core.settings.topics import COMMON, TOPICS

TABLES = {
    name: (*getattr(processes, name), *processes.LOGGING)
    for name in ("WORKER", "GATEWAY", "UP", "BENCH", "DOCTOR", "CLIENT")
}
URL_WITH_PASSWORD = "redis://user:hunter2@10.0.0.1:6379/0"


def given_value(setting: Setting) -> str:
    """Return a value that is not the default, as text."""
    samples = ("true", "3", "auto", "0.5", "llm.example", "cpu", "0.25", "127.0.0.1:7001")
    for text in (*setting.choices, *(s for s in samples if not setting.choices)):
        try:
            if setting.parse(text) != setting.default:
                return text
        except ValueError:
            continue
    raise AssertionError(f"no value for {setting.name}")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_printed_file_has_the_same_settings(table: tuple[Setting, ...]) -> None:
    flags: Mapping[str, object] = {
        one.name: [given_value(one)] * 2 if one.is_repeated else given_value(one) for one in table if not one.is_secret
    }
    found = resolve(table, flags, {}, {})
    again = resolve(table, {}, {}, parse_toml(settings_file(found.values())), "kvferry.toml")
    for one in table:
        assert again[one.name].value == found[one.name].value, one.name
        assert again[one.name].source == ("default" if one.is_secret else "kvferry.toml")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_defaults_are_comments_with_their_values(table: tuple[Setting, ...]) -> None:
    found = resolve(table, {}, {}, {})
    text = settings_file(found.values())
    assert parse_toml(text) == {}
    shown = parse_toml("\n".join(line.removeprefix("# ") for line in text.splitlines() if " = " in line))
    again = resolve(table, {}, {}, {name: value for name, value in shown.items() if value not in ("", [])}, "f")
    assert {name: one.value for name, one in again.items()} == {
        name: list(one.value) if again[name].source == "f" and one.setting.is_repeated else one.value
        for name, one in found.items()
    }


@pytest.mark.parametrize(
    ("parse", "text", "written"),
    [
        (size_or_auto, "1073741824", '"1GiB"'),
        (size_or_auto, "1000000", "1000000"),
        (size_or_auto, "auto", '"auto"'),
        (boolean, "on", "true"),
        (seconds(0, 100), "2.5", "2.5"),
        (whole_or_auto(0, 9), "auto", '"auto"'),
        (whole_or_auto(0, 9), "7", "7"),
    ],
)
def test_values_have_their_units(parse: Parser[object], text: str, written: str) -> None:
    setting = Setting("kv_memory", None, "A value.", parse=parse)
    shown = settings_file(resolve([setting], {"kv_memory": text}, {}, {}).values())
    assert f"\nkv_memory = {written} " in shown
    assert "# from --kv-memory" in shown


@given(st.text(min_size=1))
def test_any_text_is_read_as_it_was(text: str) -> None:
    setting = Setting("model", "", "A model.")
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    file = settings_file(resolve([setting], {}, {"KVFERRY_MODEL": text}, {}).values())
    assert "://" in text or parse_toml(file) == {"model": text}


def test_secrets_and_passwords_are_left_out() -> None:
    found = resolve(
        processes.WORKER,
        {"tier": [URL_WITH_PASSWORD], "model": "m\udcff"},
        {"KVFERRY_TICKET_KEY": "hunter2hunter2hunter2"},
        {},
    )
    text = settings_file(found.values())
    assert "hunter2" not in text
    assert parse_toml(text) == {}
    assert "# ticket_key is a secret (from KVFERRY_TICKET_KEY, not shown); set KVFERRY_TICKET_KEY" in text
    assert "# tier has a URL with a password (from --tier, not shown); set KVFERRY_TIER" in text
    assert "# model is not UTF-8 (from --model); set KVFERRY_MODEL" in text


def test_a_file_name_does_not_end_the_comment() -> None:
    found = resolve([Setting("model", "", "A model.")], {}, {}, {"model": "tiny"}, 'a\nmodel = "other"')
    assert parse_toml(settings_file(found.values())) == {"model": "tiny"}


def test_each_setting_has_one_topic() -> None:
    listed = list(itertools.chain.from_iterable(TOPICS.values()))
    assert len(listed) == len(set(listed))
    assert set(listed) >= COMMON
    assert set(listed) >= EVERY_NAME
