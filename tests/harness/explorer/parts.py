"""The classes under test. The defaults are the production classes; a mutation replaces one of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from harness.explorer.decode_actor import DecodeActor
from harness.explorer.gateway_actor import GatewayActor
from harness.explorer.prefill_actor import PrefillActor
from kvferry.engine.schedule.blocks.block_pool import BlockPool
from kvferry.gateway.decide.lifecycle.sample_states import DUTIES, Duty, State
from kvferry.kv.handoff.attempt import Attempt
from kvferry.kv.handoff.offers import OfferBook, check_incarnation
from kvferry.kv.handoff.quarantine import accepts_fetch
from kvferry.kv.interface.ticket import check_ticket


@dataclass(frozen=True, slots=True)
class Parts:
    """The classes and functions from which the explorer builds simulated workers and gateways."""

    book: type[OfferBook[str]] = OfferBook
    attempt: type[Attempt] = Attempt
    pool: type[BlockPool] = BlockPool
    decode_pool: type[BlockPool] = BlockPool
    check_ticket: Callable[..., None] = check_ticket
    check_incarnation: Callable[[str, str], None] = check_incarnation
    accepts_fetch: Callable[..., bool] = accepts_fetch
    duties: Mapping[State, tuple[Duty, ...]] = field(default_factory=lambda: DUTIES)
    prefill: type[PrefillActor] = PrefillActor
    decode: type[DecodeActor] = DecodeActor
    gateway: type[GatewayActor] = GatewayActor


PRODUCTION = Parts()
