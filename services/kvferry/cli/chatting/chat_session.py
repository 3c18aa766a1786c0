"""A chat: sends prompts, shows answers, and carries out commands. A turn that fails is not kept."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from kvferry.cli.chatting.answer_stats import stats_line, stats_report
from kvferry.cli.chatting.chat_client import ChatClient
from kvferry.cli.chatting.chat_lines import HELP, ChatCommand, ChatVerb, parse_line
from kvferry.cli.chatting.conversation import Conversation, Message
from kvferry.cli.chatting.line_editor import LineEditor
from kvferry.cli.chatting.received_answer import ReceivedAnswer
from kvferry.cli.chatting.screen import Screen
from kvferry.cli.output_files import OUTPUT_FILE, write_file
from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, KvferryError, UsageError


@dataclass(frozen=True, slots=True)
class ChatForm:
    """What each request of a chat has besides the messages."""

    model: str
    temperature: float | None = None
    """Temperature; `None` for the model's own."""
    max_tokens: int | None = None
    """Maximum tokens of an answer; `None` for the gateway's own."""

    def body(self, messages: list[Message]) -> bytes:
        """Return the body of a request.

        Raises:
            InvalidRequest: a text has an unpaired surrogate, as a terminal may send.
        """
        body: dict[str, object] = {"model": self.model, "messages": messages, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        try:
            return msgspec.json.encode(body)
        except UnicodeEncodeError:
            raise InvalidRequest("a prompt or the model's name is not valid Unicode; type it again") from None


class ChatSession:
    """One chat with one model."""

    def __init__(
        self, client: ChatClient, form: ChatForm, conversation: Conversation, screen: Screen, clock: Clock
    ) -> None:
        """
        Args:
            client: client of the gateway.
            form: model and sampling of the requests.
            conversation: the conversation to continue, with its system prompt.
            screen: where answers are shown.
            clock: clock of the measurements.
        """
        self.conversation = conversation
        self._client, self._form, self._screen, self._clock = client, form, screen, clock
        self._last: ReceivedAnswer | None = None
        self._failed: str | None = None
        """Prompt of the last request if it failed, for /retry."""
        self._saved: set[Path] = set()
        """Files of this chat, which it may replace."""

    def run(self, editor: LineEditor, *, has_stats: bool) -> None:
        """Read and carry out lines until the end of input, Ctrl-C at the prompt, or /exit.

        Args:
            editor: reads the lines.
            has_stats: whether a line about its times follows each answer.
        """
        while True:
            try:
                line = editor.read()
            except (EOFError, KeyboardInterrupt):
                self._screen.note("\n")
                return
            except UnicodeDecodeError:
                self._screen.error("the line is not valid Unicode; type it again")
                continue
            try:
                if self._take(line, has_stats=has_stats):
                    return
            except KvferryError as error:
                self._screen.error(error.message)
            except KeyboardInterrupt:  # just before or after the answer
                self._screen.note("stopped")

    def _take(self, line: str, *, has_stats: bool) -> bool:
        """Carry out a line; return whether it ends the chat.

        Raises:
            KvferryError: a command is not possible, or the turn failed.
        """
        found = parse_line(line)
        if found == ChatCommand(ChatVerb.EXIT):
            return True
        if isinstance(found, str):
            if found:
                self._answer_one(found, has_stats=has_stats)
        elif found.verb is ChatVerb.RETRY:
            self._retry(has_stats=has_stats)
        else:
            self._carry_out(found)
        return False

    def answer(self, prompt: str) -> ReceivedAnswer:
        """Send a prompt after the conversation so far and show the answer as it arrives. The caller keeps it.

        Raises:
            KvferryError: the request was refused, or the answer failed or was cut; a part of it may be on the screen.
            KeyboardInterrupt: the user stopped it; see `stoppable`.
        """
        received = ReceivedAnswer(self._clock.monotonic())
        self._last = received
        body = self._form.body(self.conversation.messages(prompt))
        try:
            with closing(self._client.answer(body)) as chunks:
                for chunk in chunks:
                    for kind, text in received.add(chunk, self._clock.monotonic()):
                        self._screen.part(kind, text)
        finally:
            self._screen.end_answer()
        return received

    def _answer_one(self, prompt: str, *, has_stats: bool) -> bool:
        """Send a prompt and keep the turn; of an answer that the user stops, the text so far is kept. Return whether
        the turn was kept.

        Raises:
            KvferryError: the turn failed.
        """
        self._failed, self._last = prompt, None
        stopped = False
        try:
            self.answer(prompt)
        except KeyboardInterrupt:
            stopped = True
        received = self._last
        if received is None or (stopped and not received.content):
            self._screen.note("stopped before any text; the prompt was not kept")
            return False
        self.conversation = self.conversation.answered(prompt, received.content)
        self._failed = None
        if stopped:
            self._screen.note("stopped; the text so far is kept, /undo forgets it")
        elif why := cut_note(received):
            self._screen.note(why)
        if has_stats and not stopped:
            self._screen.note(stats_line(received))
        return True

    def _carry_out(self, command: ChatCommand) -> None:
        """Carry out a command that sends nothing.

        Raises:
            KvferryError: the command is not possible now.
        """
        actions: dict[ChatVerb, Callable[[], str]] = {
            ChatVerb.HELP: lambda: "\n".join(f"  {name:<16} {text}" for name, text in HELP.items()),
            ChatVerb.SYSTEM: lambda: self._set_system(command.argument),
            ChatVerb.CLEAR: self._clear,
            ChatVerb.UNDO: self._undo,
            ChatVerb.STATS: self._stats,
            ChatVerb.SAVE: lambda: self._save(command.argument),
        }
        self._screen.note(actions[command.verb]())

    def _retry(self, *, has_stats: bool) -> None:
        """Send the prompt that failed, or else the last one in place of its turn, which stays if this fails.

        Raises:
            KvferryError: there is no prompt, or the turn failed.
        """
        before = self.conversation
        prompt = self._failed
        if prompt is None:
            if not before.turns:
                raise InvalidRequest("there is no prompt to send again; type one")
            prompt = before.turns[-1].prompt
            self.conversation = before.undone()
        is_kept = False
        try:
            is_kept = self._answer_one(prompt, has_stats=has_stats)
        finally:
            if not is_kept:
                self.conversation = before

    def _set_system(self, text: str) -> str:
        self.conversation = self.conversation.with_system(text)
        return "the system prompt is set" if text else "there is no system prompt now"

    def _clear(self) -> str:
        self.conversation, self._failed = self.conversation.cleared(), None
        return "the conversation is forgotten" + (", the system prompt stays" * bool(self.conversation.system))

    def _undo(self) -> str:
        if not self.conversation.turns:
            raise InvalidRequest("there is no turn to forget")
        self.conversation, self._failed = self.conversation.undone(), None
        return f"the last turn is forgotten; {len(self.conversation.turns)} remain"

    def _stats(self) -> str:
        if self._last is None or self._last.first_at is None:
            raise InvalidRequest("there is no answer yet; type a prompt")
        return stats_report(self._last)

    def _save(self, name: str) -> str:
        try:
            path = Path(name).expanduser().absolute()
            OUTPUT_FILE.convert(str(path), None, None)
        except click.BadParameter as error:
            raise UsageError(error.message, field="save") from None
        except (OSError, RuntimeError, ValueError):
            raise UsageError("this is no name of a file; use another one", field="save") from None
        if path.exists() and path not in self._saved:
            raise UsageError(f"{name} exists; use another name", field="save")
        messages = self.conversation.messages()
        write_file(path, msgspec.json.format(msgspec.json.encode(messages), indent=2).decode() + "\n")
        self._saved.add(path)
        return f"wrote {len(messages)} messages to {name}"


def cut_note(received: ReceivedAnswer) -> str:
    """Return a note on an answer that ended before its end; empty for others."""
    if received.finish_reason == "length":
        return "the answer is cut off at its maximum number of tokens, or at the end of the context"
    return ""
