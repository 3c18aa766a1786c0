"""What a line that was typed in a chat means: a prompt, a part of one, or a command."""

from dataclasses import dataclass
from enum import StrEnum

from kvferry.core.errors import InvalidRequest, shortened


class ChatVerb(StrEnum):
    """A command of a chat."""

    HELP = "help"
    SYSTEM = "system"
    CLEAR = "clear"
    UNDO = "undo"
    RETRY = "retry"
    STATS = "stats"
    SAVE = "save"
    EXIT = "exit"


HELP = {
    "/help": "show this list",
    "/system TEXT": "set the system prompt; without text, remove it",
    "/clear": "forget the conversation; the system prompt stays",
    "/undo": "forget the last prompt and its answer",
    "/retry": "send the last prompt again, also one that failed",
    "/stats": "show where the time of the last answer went",
    "/save FILE": "write the messages to a new file, as JSON",
    "/exit": "end, as Ctrl-D",
    "\\ at the end": "continue the prompt on the next line",
    "// at the start": "a prompt that starts with /",
    "Ctrl-C": "stop an answer; end at the prompt",
}
"""Description of each command and key."""
_WITH_TEXT = frozenset({ChatVerb.SYSTEM, ChatVerb.SAVE})


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A command and its argument."""

    verb: ChatVerb
    argument: str = ""


def parse_line(text: str) -> ChatCommand | str:
    """Return the command that a text is, or else the prompt; an empty prompt is not sent.

    Raises:
        InvalidRequest: the command does not exist, takes no argument, or needs one.
    """
    text = text.strip()
    if not text.startswith("/"):
        return text
    if text.startswith("//"):
        return text[1:]
    word, _, argument = text[1:].partition(" ")
    argument = argument.strip()
    try:
        verb = ChatVerb(word.lower())
    except ValueError:
        raise InvalidRequest(
            f"there is no command /{shortened(word)}; /help lists the commands, and a prompt may start with //"
        ) from None
    if argument and verb not in _WITH_TEXT:
        raise InvalidRequest(f"/{verb} takes no argument; type it alone")
    if verb is ChatVerb.SAVE and not argument:
        raise InvalidRequest("/save needs the name of a file: /save chat.json")
    return ChatCommand(verb, argument)


def continues(line: str) -> bool:
    """Return whether a prompt continues on the next line: the line ends with an odd number of backslashes."""
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def joined(lines: list[str]) -> str:
    """Join the lines of a prompt, each of which but the last one ends with a backslash."""
    return "\n".join([*(line[:-1] for line in lines[:-1]), *lines[-1:]])
