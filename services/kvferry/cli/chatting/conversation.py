"""The messages of a chat. A turn is a prompt with its answer; one that failed is never a part of the conversation."""

from dataclasses import dataclass, replace

Message = dict[str, str]
"""A message as the API takes it: `role` and `content`."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A prompt and its answer."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt and the turns so far."""

    system: str = ""
    """System prompt; empty for none."""
    turns: tuple[ChatTurn, ...] = ()

    def messages(self, prompt: str | None = None) -> list[Message]:
        """Return the messages in order, followed by a new prompt if there is one."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            found.append({"role": "user", "content": turn.prompt})
            found.append({"role": "assistant", "content": turn.answer})
        return found if prompt is None else [*found, {"role": "user", "content": prompt}]

    def answered(self, prompt: str, answer: str) -> "Conversation":
        """Return the conversation with one more turn."""
        return replace(self, turns=(*self.turns, ChatTurn(prompt, answer)))

    def undone(self) -> "Conversation":
        """Return the conversation without its last turn, if it has one."""
        return replace(self, turns=self.turns[:-1])

    def cleared(self) -> "Conversation":
        """Return the conversation without turns."""
        return replace(self, turns=())

    def with_system(self, system: str) -> "Conversation":
        """Return the conversation with another system prompt; empty for none."""
        return replace(self, system=system)
