"""Pins prefixes in an engine under test, and records the replies."""

from dataclasses import dataclass, field

from harness.fakes.engines import a_request, run_until_idle
from kvferry.core.errors import KvferryError
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.messages import PinnedPrefix


@dataclass
class Pinner:
    """Sends pins to an engine; their request ids are `pin0`, `pin1`, ..."""

    engine: Engine
    replies: dict[str, PinnedPrefix | KvferryError] = field(default_factory=dict)
    """Reply by request id."""
    num_sent: int = 0

    def send(self, tokens: list[int], ttl: float = 60.0, *, tenant: str = "") -> str:
        """Send a pin; return its request id."""
        name = f"pin{self.num_sent}"
        self.num_sent += 1
        request = a_request(name, tokens, max_tokens=9, scope=tenant)
        self.engine.pinning.pin(request, ttl, lambda reply: self._keep(name, reply))
        return name

    def pin(self, tokens: list[int], ttl: float = 60.0, *, tenant: str = "") -> PinnedPrefix:
        """Pin a prefix, run the engine until it is idle, and return the pin.

        Raises:
            KvferryError: the pin was refused.
        """
        name = self.send(tokens, ttl, tenant=tenant)
        run_until_idle(self.engine)
        reply = self.replies[name]
        if isinstance(reply, KvferryError):
            raise reply
        return reply

    def _keep(self, name: str, reply: PinnedPrefix | KvferryError) -> None:
        assert name not in self.replies, f"{name} got two replies"
        self.replies[name] = reply


def cached_tokens(engine: Engine, tokens: list[int], *, tenant: str = "") -> int:
    """Run a request and return how many tokens of its prompt were cached."""
    engine.add(a_request("probe", tokens, max_tokens=1, scope=tenant))
    found = 0
    while engine.has_work:
        for update in engine.step().updates:
            if update.request_id == "probe":
                found = update.num_cached
        engine.check_integrity()
    return found


def flood(engine: Engine, *, rounds: int = 3) -> None:
    """Run prompts of another tenant, as long as possible, until they have taken each page that is not pinned several
    times."""
    length = engine.max_model_tokens - engine.allocator.block_tokens
    pages = engine.allocator.needs.pages_for(length)
    for number in range(rounds * -(-engine.allocator.pool.num_blocks // pages)):
        tokens = [(number + i) % 90 for i in range(length)]
        engine.add(a_request(f"flood{number}", tokens, max_tokens=1, scope=f"flood{number}"))
        run_until_idle(engine)
