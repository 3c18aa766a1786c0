"""Mutations of the block pool, the workers, the gateway and their checks; each breaks one rule."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.explorer.decode_actor import DecodeActor
from harness.explorer.gateway_actor import Call, GatewayActor
from harness.explorer.mutation import FOUND, Mutation, anything, mutation
from harness.explorer.network import Message
from harness.explorer.parts import PRODUCTION
from harness.explorer.prefill_actor import PrefillActor
from harness.explorer.records import CallKey, Load, Request
from kvferry.core.ids import BlockId
from kvferry.engine.schedule.blocks.block_pool import BlockPool
from kvferry.gateway.decide.lifecycle.sample_states import DUTIES, Duty
from kvferry.kv.handoff import attempt as effects
from kvferry.kv.handoff.attempt import Effect, Effects

if TYPE_CHECKING:
    from harness.explorer.world import World

# ---------------------------------------------------------------------- pages


@mutation("pages leave quarantine when they are released", "tight", "decode_pool", "vllm-project/vllm#55470")
class ReleaseEndsQuarantine(BlockPool):
    def release(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            self._writers[block] = 0
        super().release(blocks)

    def end_write(self, blocks: Sequence[BlockId]) -> None:
        """Do nothing: `release` has already ended the quarantine."""


class _NeverRaised(BlockPool):
    def allocate(self, count: int) -> list[BlockId] | None:
        before = [self.epochs[b] for b in range(self.num_blocks)]
        taken = super().allocate(count)
        for block, epoch in enumerate(before):
            self.epochs[block] = epoch
        return taken


@mutation("the epoch is raised after the write", "cached", "prefill", pool=_NeverRaised)
class EpochRaisedAfterTheWrite(PrefillActor):
    def answer(self, world: "World", key: CallKey) -> None:
        for page in self.jobs[key].pages[self.jobs[key].first_fresh :]:
            self.pool.epochs[page] += 1
        super().answer(world, key)


@mutation("pages are shared before they are computed", "prefix", "prefill", "vllm-project/vllm#46951")
class UncommittedPagesShared(PrefillActor):
    def admit(self, world: "World") -> None:
        super().admit(world)
        for key, job in self.jobs.items():
            self.cached.update({world.plan(key).content(i): page for i, page in enumerate(job.pages)})


@mutation("a shared page is not referenced by its second owner", "prefix", "prefill")
class SharedPageNotHeld(PrefillActor):
    def compute(self, world: "World", key: CallKey) -> None:
        super().compute(world, key)
        self.pool.release(self.jobs[key].pages[: self.jobs[key].first_fresh])


@mutation("an aborted prompt is still delivered", "deaths", "prefill", "sgl-project/sglang#30233")
class AbortedPromptGoesOn(PrefillActor):
    def on_hangup(self, world: "World", message: Message) -> None:
        job = self.jobs.get(message.body[0])
        if job is not None:
            self.pool.release(job.pages)


# ---------------------------------------------------------------------- the decode worker


@mutation("epochs are read before the data", "cached", "decode", "kvcache-ai/Mooncake#3076")
class EpochsReadBeforeTheData(DecodeActor):
    early: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def do_effect(self, world: "World", number: int, load: Load, effect: Effect) -> Effects:
        if isinstance(effect, effects.StartRead):
            pages = world.remote_pages(self.life_asked(world, load.attempt.source))
            if pages is not None:
                self.early = (*self.early, (number, tuple(pages[1][p] for p in load.attempt.remote)))
        return super().do_effect(world, number, load, effect)

    def read_epochs(self, world: "World", number: int, fault: str) -> None:
        self.reads[number] = self.reads[number]._replace(wants_epochs=False)
        self.perform(world, number, self.loads[number].attempt.epochs(dict(self.early)[number]))


@mutation(
    "peers are identified by address, not by incarnation",
    "reborn",
    "decode",
    "ai-dynamo/nixl#2027",
    check_incarnation=anything,
)
class OldLifeAccepted(DecodeActor):
    def life_asked(self, world: "World", source: Any) -> int:
        return world.life_of("P")


@mutation("a failed read is used as if it had succeeded", "everything", "decode", "vllm-project/vllm#52234")
class FailedReadUsed(DecodeActor):
    def report(self, world: "World", number: int, load: Load, failure: str | None) -> None:
        request = self.requests.get(load.key)
        if failure is not None and request is not None:
            self.requests[load.key] = request._replace(state="running", is_loaded=True)
        else:
            super().report(world, number, load, failure)


@mutation("tokens are computed where a read may still write", "everything", "decode", "sgl-project/sglang#24527")
class RecomputedInPlace(DecodeActor):
    def report(self, world: "World", number: int, load: Load, failure: str | None) -> None:
        request = self.requests.get(load.key)
        if failure is not None and request is not None:
            self.requests[load.key] = request._replace(state="running", source=None)
        else:
            super().report(world, number, load, failure)


@mutation("a second read begins into pages that a first may still write", "everything", "decode")
class TwoReadsIntoOnePlace(DecodeActor):
    def report(self, world: "World", number: int, load: Load, failure: str | None) -> None:
        request = self.requests.get(load.key)
        if failure is None or request is None or request.source is None or number > 0:
            super().report(world, number, load, failure)
            return
        self._load(world, load.key, request.source, list(request.pages))


@mutation("recomputation does not wake the engine", "everything", "decode", "local-inference-lab/vllm#191")
class RecomputeDoesNotWake(DecodeActor):
    def wake(self, world: "World") -> None:
        """Do nothing: the engine is not woken up."""


@mutation("pages in quarantine are never freed", "everything", "decode", "LMCache/LMCache#1034")
class QuarantineForEver(DecodeActor):
    def quiet(self, world: "World", number: int) -> None:
        self.loads.pop(number, None)
        self.reads.pop(number, None)
        self.wake(world)


# ---------------------------------------------------------------------- the gateway and what is checked


class _NoDismissal(DecodeActor):
    def dismiss(self, world: "World", request: Request) -> None:
        """Do nothing: the offer is not dismissed."""

    def _tell_finish(self, world: "World", source: Any, *, done: bool) -> None:
        if done:
            super()._tell_finish(world, source, done=done)


_WITHOUT_RELEASE = {state: tuple(d for d in duties if d is not Duty.RELEASE_TICKET) for state, duties in DUTIES.items()}


@mutation(
    "pages stay held after the client disconnects",
    "deaths",
    "gateway",
    "vllm-project/vllm#41269",
    duties=_WITHOUT_RELEASE,
    decode=_NoDismissal,
)
class NoReleaseForTheClient(GatewayActor):
    """Neither gateway nor decode worker releases the offer, so that only timers free its pages."""


@mutation("the offer of a cancelled prompt is not released", "deaths", "gateway")
class UnheardOfferNotReleased(GatewayActor):
    def _hang_up(self, world: "World", key: int, call: Call) -> None:
        super()._hang_up(world, key, call._replace(ticket_id=""))


@mutation("a response to an abandoned call is accepted", "deaths", "gateway")
class StaleAnswerTaken(GatewayActor):
    def receive(self, world: "World", message: Message) -> None:
        key, _ = message.body[0]
        getattr(self, f"on_{message.kind}")(world, key, message)


@mutation("a silent worker is waited for indefinitely", "deaths", "gateway")
class NoSilenceTimer(GatewayActor):
    def silent(self, world: "World", name: str) -> None:
        """Do nothing: calls to a silent worker are not abandoned."""


FOUND.append(
    Mutation(
        "foreign ticket accepted",
        "a ticket for a different tenant's tokens is accepted",
        "swapped",
        replace(PRODUCTION, check_ticket=anything),
        "vllm-project/vllm#52234",
    )
)
