"""A fake grammar whose masks depend only on the number of generated tokens. A schedule of the test makes masks late."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from harness.fakes.engines import VOCAB
from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.token_mask import Bits

SECONDS = 30.0
ANY = Constraint(ConstraintKind.JSON_OBJECT, "")


def allowed_after(generated: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return the mask of the fake grammar: after g tokens, only tokens congruent to g modulo 5 are allowed."""
    allowed: npt.NDArray[np.bool_] = np.arange(VOCAB) % 5 == len(generated) % 5
    return allowed


@dataclass
class FakeMasks:
    """Makes masks that are late by the schedule: each mask takes the next number, in a cycle."""

    schedule: list[int]
    waits: int = 0
    made: list["FakeMask"] = field(default_factory=list)

    def begin(self, _: Constraint, generated: Sequence[int]) -> "FakeMask":
        return self.of(tuple(generated))

    def of(self, generated: tuple[int, ...], mask: "FakeMask | None" = None) -> "FakeMask":
        self.waits += 1
        mask = mask or FakeMask(self, (), 0)
        mask.generated, mask.late = generated, self.schedule[self.waits % len(self.schedule)]
        mask.is_known.set()
        self.made.append(mask)
        return mask


@dataclass
class FakeMask:
    owner: FakeMasks
    generated: tuple[int, ...]
    late: int
    """Number of readiness checks until the mask is ready."""
    next: "FakeMask | None" = None
    is_known: threading.Event = field(default_factory=threading.Event)
    """Set when the tokens before the mask are known, or when it is abandoned."""

    @property
    def is_ready(self) -> bool:
        self.late = max(0, self.late - 1)
        return self.late == 0

    def wait(self) -> Bits | None:
        assert self.is_known.wait(SECONDS), "a mask was neither computed nor abandoned"
        return np.packbits(allowed_after(self.generated), bitorder="little") if self.late == 0 else None

    def after(self, token_ids: Sequence[int]) -> "FakeMask":
        return self.owner.of((*self.generated, *token_ids), self.next)

    def following(self) -> "FakeMask":
        self.next = self.next or FakeMask(self.owner, (), 1 << 30)
        return self.next

    def abandon(self) -> None:
        if self.next is not None:
            self.next.is_known.set()
        self.next = None

    def forced_tokens(self) -> Sequence[int]:
        """Force a token after every third one; the next mask allows this token only if the model samples it."""
        return () if self.late or len(self.generated) % 3 else (len(self.generated) % 5,)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        if self.late:
            return 0
        for count, token in enumerate(token_ids):
            if not allowed_after((*self.generated, *token_ids[:count]))[token]:
                return count
        return len(token_ids)

    def after_each(self, token_ids: Sequence[int]) -> "list[FakeMask]":
        assert self.num_allowed(token_ids) == len(token_ids), "drafts must be allowed"
        return [self.owner.of((*self.generated, *token_ids[: count + 1])) for count in range(len(token_ids))]


def constrained(engine: Engine, schedule: list[int]) -> FakeMasks:
    masks = FakeMasks(schedule)
    engine._masks = masks  # type: ignore[assignment]
    return masks


def with_constraint(request: EngineRequest) -> EngineRequest:
    return replace(request, sampling=replace(request.sampling, constraint=ANY))
