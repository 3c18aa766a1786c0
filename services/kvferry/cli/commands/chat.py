"""`kvferry chat`: a conversation with a running gateway, in the terminal or for one answer in a script."""

import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING

import click

from kvferry.cli.help_pages import SettingsCommand
from kvferry.cli.options import NumberRange, Values, api_key, with_settings
from kvferry.core.clock import SystemClock
from kvferry.core.errors import UsageError
from kvferry.core.process import config
from kvferry.core.settings.processes import CLIENT

if TYPE_CHECKING:
    from kvferry.cli.chatting.chat_session import ChatSession
    from kvferry.cli.chatting.screen import Screen

_MAX_PROMPT_BYTES = 8 << 20


@click.command("chat", cls=SettingsCommand)
@click.argument("prompt", required=False)
@click.option("--model", default="", help="Model name; default: the first model that the gateway lists.")
@click.option("--system", default="", help="System prompt.")
@click.option("--temperature", type=NumberRange(0.0, 100.0), help="Temperature; default: the model's own.")
@click.option("--max-tokens", type=click.IntRange(1, 1 << 30), help="Maximum tokens of an answer.")
@click.option(
    "--timeout", default=600.0, show_default=True, type=NumberRange(1.0, 86400.0), help="Seconds for one answer."
)
@click.option("--no-stats", is_flag=True, help="Leave out the line about times and tokens after each answer.")
@with_settings(CLIENT)
def command(
    values: Values,
    *,
    prompt: str | None,
    model: str,
    system: str,
    temperature: float | None,
    max_tokens: int | None,
    timeout: float,
    no_stats: bool,
) -> None:
    """Chat with a running gateway; with PROMPT or piped input, get one answer and exit.

    \b
      kvferry chat
      kvferry chat "Why is the sky blue?"
      echo "Translate to French: good morning" | kvferry chat --temperature 0 > answer.txt
      kvferry chat --url https://llm.example.com/v1 --api-key-file key --system "Answer briefly."

    In a chat, /help lists the commands, Ctrl-C stops an answer, and Ctrl-D ends. In a pipe, the standard output has the
    answer alone: no reasoning, no colours.
    """
    from kvferry.cli.chatting.chat_client import ChatClient
    from kvferry.cli.chatting.chat_session import ChatForm, ChatSession
    from kvferry.cli.chatting.conversation import Conversation
    from kvferry.cli.chatting.screen import Screen
    from kvferry.cli.server_url import ServerUrl

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may have any character, the terminal only some
    is_terminal = sys.stdout.isatty()
    is_chat = prompt is None and is_terminal and sys.stdin.isatty()
    once = None if is_chat else _prompt(prompt)
    clock = SystemClock()
    client = ChatClient(ServerUrl.parse(values["url"]), clock, api_key=api_key(values), timeout_seconds=timeout)
    screen = Screen(sys.stdout, sys.stderr, is_terminal=is_terminal, has_colours=is_terminal and _has_colours())
    form = ChatForm(model or client.first_model(), temperature, max_tokens)
    session = ChatSession(client, form, Conversation(system), screen, clock)
    if once is None:
        _chat(session, screen, f"{form.model} at {client.url}; /help lists the commands", has_stats=not no_stats)
    else:
        _answer(session, once, has_stats=not no_stats)


def _chat(session: "ChatSession", screen: "Screen", greeting: str, *, has_stats: bool) -> None:
    from kvferry.cli.chatting.line_editor import LineEditor
    from kvferry.cli.chatting.typed_history import TypedHistory

    editor = LineEditor(TypedHistory(config.cache_dir() / "chat-history"))
    screen.note(greeting)
    try:
        session.run(editor, has_stats=has_stats)
    finally:
        editor.close()


def _answer(session: "ChatSession", prompt: str, *, has_stats: bool) -> None:
    from kvferry.cli.chatting.answer_stats import stats_line
    from kvferry.cli.chatting.chat_session import cut_note

    received = session.answer(prompt)
    if why := cut_note(received):
        click.echo(f"kvferry: {why}", err=True)
    if has_stats and sys.stderr.isatty():
        click.echo(stats_line(received), err=True)


def _prompt(given: str | None) -> str:
    """Return the one prompt, from the command line or else from the standard input.

    Raises:
        UsageError: it is empty, too large, or not UTF-8.
    """
    text = given
    if text is None:
        raw = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
        if len(raw) > _MAX_PROMPT_BYTES:
            raise UsageError(f"the input has more than {_MAX_PROMPT_BYTES} bytes; send a shorter one", field="prompt")
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise UsageError("the input is not UTF-8; convert it, for example with iconv", field="prompt") from None
    if not text.strip():
        raise UsageError("the prompt is empty; give one as an argument or by the standard input", field="prompt")
    return text.strip("\n")


def _has_colours() -> bool:
    environment = config.environment()
    return not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
