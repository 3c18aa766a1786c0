"""The calls of one answer as they are read, and the reader of a call's JSON object."""

from collections.abc import Callable, Collection, Generator, Mapping

from kvferry.core.inference.tool_calls import CallDelta
from kvferry.text.answers.json_reader import ignored, read_object, read_short_string, read_value, skip_space
from kvferry.text.answers.pieces import NotACall

MAX_CALLS = 128
"""Maximum number of calls in one answer."""
_ARGUMENTS = frozenset({"arguments", "parameters"})
_NAME = "name"
_IGNORED = frozenset({"id", "type"})
"""Members that models add and that have no effect here."""


class Calls:
    """Collects the calls of an answer."""

    def __init__(
        self,
        names: Collection[str],
        new_id: Callable[[], str],
        max_calls: int | None = None,
        schemas: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        """
        Args:
            names: names of the tools that the request offers; a call with another name is content.
            new_id: function that generates the id of a call.
            max_calls: number of calls to report; further ones are read and dropped. `None` for no limit.
            schemas: schemas of the tools' arguments by name, for formats whose values do not tell their types.
        """
        self.names = names
        self.schemas = schemas or {}
        self._new_id = new_id
        self._max_calls = max_calls
        self._count = 0
        self.is_open = False
        """Whether a call has begun and has not ended."""
        self.num_ended = 0
        self.num_accepted = 0
        """Number of times that all text so far was found to belong to the calls, whatever follows."""
        self._begun: dict[int, CallDelta] = {}
        self._arguments: dict[int, list[str]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all calls to report have ended."""
        return self._max_calls is not None and self.num_ended >= self._max_calls

    def begin(self, name: str) -> None:
        """Begin a call of the tool `name`.

        Raises:
            NotACall: the answer has too many calls.
        """
        if self._count >= MAX_CALLS:
            raise NotACall
        index = self._count
        self._count += 1
        self.is_open = True
        if self._max_calls is None or index < self._max_calls:
            self._begun[index] = CallDelta(index, self._new_id(), name)
            self._arguments[index] = []

    def arguments(self, text: str) -> None:
        """Add text to the arguments of the call that has begun."""
        index = self._count - 1
        if self._max_calls is None or index < self._max_calls:
            self._arguments.setdefault(index, []).append(text)

    def end(self) -> None:
        """End the call that has begun, if any."""
        if self.is_open:
            self.is_open = False
            self.num_ended += 1
            self.accept()

    def accept(self) -> None:
        """Take all text so far for a part of the calls, such as the end of a list of calls."""
        self.num_accepted += 1

    def take(self) -> tuple[CallDelta, ...]:
        """Return what was collected since the last call of this function."""
        if not self._arguments:
            return ()
        deltas: list[CallDelta] = []
        for index, pieces in self._arguments.items():
            begun = self._begun.get(index)
            deltas.append(
                CallDelta(index, begun.call_id if begun else "", begun.name if begun else "", "".join(pieces))
            )
        self._begun, self._arguments = {}, {}
        return tuple(deltas)


def read_call(calls: Calls) -> Generator[None, str, None]:
    """Read a call after its opening brace: `{"name": "f", "arguments": {...}}`, in any order of the members.

    Arguments stream if the name comes first. `parameters` is another name for `arguments`; a call without arguments has
    an empty object.

    Raises:
        NotACall: the text is not a call of this format.
    """
    name: str | None = None
    kept: list[str] | None = None
    has_arguments = False
    seen: set[str] = set()
    character = yield from skip_space()
    while True:
        if character != '"':
            raise NotACall
        key = yield from read_short_string()
        if key in seen or (yield from skip_space()) != ":":
            raise NotACall
        seen.add(key)
        character = yield from skip_space()
        after = ""
        if key == _NAME and character == '"':
            name = yield from read_short_string()
            if name not in calls.names:
                raise NotACall
        elif key in _ARGUMENTS and character == "{" and not has_arguments:
            has_arguments = True
            if name is None:
                kept = []
                yield from read_object(kept.append)
            else:
                calls.begin(name)
                yield from read_object(calls.arguments)
        elif key in _IGNORED:
            after = yield from read_value(character, ignored)
        else:
            raise NotACall
        character = yield from skip_space(after)
        if character == "}":
            break
        if character != ",":
            raise NotACall
        character = yield from skip_space()
    if name is None:
        raise NotACall
    if not calls.is_open:
        calls.begin(name)
        calls.arguments("".join(kept) if kept is not None else "{}")
    calls.end()
