"""The classes under test. The defaults are the production ones; a mutation puts its own in their place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvferry.engine.blocks import BlockPool
from kvferry.gateway.release import DUTIES, Duty, State
from kvferry.kv.attempt import Attempt
from kvferry.kv.offers import OfferBook, check_incarnation
from kvferry.kv.quarantine import accepts_fetch
from kvferry.kv.ticket import check_ticket
from kvferry.testing.explorer.decode_actor import DecodeActor
from kvferry.testing.explorer.gateway_actor import GatewayActor
from kvferry.testing.explorer.prefill_actor import PrefillActor


@dataclass(frozen=True, slots=True)
class Parts:
    """What a world is built of."""

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
