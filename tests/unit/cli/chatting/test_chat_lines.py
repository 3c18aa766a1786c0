"""What is typed in a chat is a prompt or a command."""

import pytest

from kvferry.cli.chatting.chat_lines import HELP, ChatCommand, ChatVerb, continues, joined, parse_line
from kvferry.core.errors import InvalidRequest

READ: dict[str, ChatCommand | str] = {
    "hello": "hello",
    "  hello \n": "hello",
    "": "",
    "   ": "",
    "/help": ChatCommand(ChatVerb.HELP),
    "/EXIT ": ChatCommand(ChatVerb.EXIT),
    "/system Answer in\nFrench.": ChatCommand(ChatVerb.SYSTEM, "Answer in\nFrench."),
    "/system": ChatCommand(ChatVerb.SYSTEM),
    "/save  my chat.json": ChatCommand(ChatVerb.SAVE, "my chat.json"),
    "//etc/hosts?": "/etc/hosts?",
    "a /help": "a /help",
}
REFUSED = {
    "/etc/hosts": "no command /etc/hosts; /help lists the commands",
    "/": "no command /;",
    "/save": "needs the name of a file",
    "/clear all": "/clear takes no argument",
    "/" + "x" * 500: "…",
}


@pytest.mark.parametrize("line", READ)
def test_a_line_is_read(line: str) -> None:
    assert parse_line(line) == READ[line]


@pytest.mark.parametrize("line", REFUSED)
def test_a_command_that_is_not_possible_is_refused_with_the_remedy(line: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_line(line)
    assert REFUSED[line] in refused.value.message
    assert len(refused.value.message) < 200


def test_the_help_names_each_command() -> None:
    named = {name.split()[0].removeprefix("/") for name in HELP if name.startswith("/") and name[1] != "/"}
    assert named == set(ChatVerb)


@pytest.mark.parametrize(
    ("line", "expected"), [("a\\", True), ("a\\\\", False), ("\\", True), ("a", False), ("a\\ ", False), ("", False)]
)
def test_a_trailing_backslash_continues_a_prompt(line: str, expected: bool) -> None:
    assert continues(line) is expected


def test_continued_lines_are_joined_without_their_backslashes() -> None:
    assert joined(["a\\", "b\\", "c"]) == "a\nb\nc"
    assert joined(["a\\\\"]) == "a\\\\"
