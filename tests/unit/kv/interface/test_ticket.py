"""Tickets: a sealed ticket opens unchanged; all other bytes are refused with a specific reason."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import TicketRejected
from kvferry.kv.interface.ticket import Keyring, Ticket, check_ticket, digest_tokens, plan_for
from kvferry.kv.pages.layout import KvLayout

TOKENS = list(range(40))
LAYOUT = KvLayout("digest", "float32", 2, 3, 4, 16)
KEYS = Keyring([b"k" * 32])


def a_ticket(**changes: object) -> Ticket:
    ticket = Ticket(
        ticket_id="ab" * 16,
        worker_id="w",
        incarnation="1" * 16,
        control_address="127.0.0.1:1",
        connector="shm",
        fingerprint=LAYOUT.fingerprint,
        scope="t",
        tokens_digest=digest_tokens(TOKENS[:39]),
        num_tokens=39,
        block_ids=(4, 7, 9),
        epochs=(1, 2, 3),
        expires_wall=1000.0,
    )
    return msgspec.structs.replace(ticket, **changes)


def check(ticket: Ticket, **changes: object) -> None:
    arguments = {
        "fingerprint": LAYOUT.fingerprint,
        "block_tokens": 16,
        "scope": "t",
        "tokens": TOKENS,
        "now_wall": 999.0,
    }
    check_ticket(ticket, **{**arguments, **changes})  # type: ignore[arg-type]


def test_a_sealed_ticket_opens_unchanged() -> None:
    assert KEYS.open(KEYS.seal(a_ticket())) == a_ticket()


def test_a_ticket_altered_in_any_byte_is_refused() -> None:
    sealed = KEYS.seal(a_ticket())
    for i in range(len(sealed)):
        for flip in (0x01, 0x80):
            altered = bytearray(sealed)
            altered[i] ^= flip
            with pytest.raises(TicketRejected) as caught:
                KEYS.open(bytes(altered))
            expected = "TICKET_MALFORMED" if i < 4 else "TICKET_KEY_UNKNOWN" if i < 8 else "TICKET_FORGED"
            assert caught.value.reason == expected, i


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_ticket_are_refused(data: bytes) -> None:
    with pytest.raises(TicketRejected):
        KEYS.open(data)
    with pytest.raises(TicketRejected):
        KEYS.open(b"kvt1" + data)


@pytest.mark.parametrize("length", [0, 3, 39, 40, 41])
def test_a_ticket_cut_short_is_refused(length: int) -> None:
    with pytest.raises(TicketRejected):
        KEYS.open(KEYS.seal(a_ticket())[:length])


def test_keys_can_be_rotated() -> None:
    old, new = b"o" * 32, b"n" * 32
    sealed_before = Keyring([old]).seal(a_ticket())
    both = Keyring([new, old])
    assert both.open(sealed_before) == a_ticket()
    with pytest.raises(TicketRejected) as caught:
        Keyring([old]).open(both.seal(a_ticket()))
    assert caught.value.reason == "TICKET_KEY_UNKNOWN"


@pytest.mark.parametrize("secrets", [[], [b"short"]])
def test_a_weak_keyring_is_refused(secrets: list[bytes]) -> None:
    with pytest.raises(ValueError, match="keyring"):
        Keyring(secrets)


def test_a_ticket_sealed_by_a_newer_version_is_refused_when_its_form_changed() -> None:
    body = msgspec.msgpack.encode(["only", "two"])
    sealed = KEYS.seal(a_ticket())
    forged = sealed[:8] + KEYS._mac(sealed[4:8], body) + body
    with pytest.raises(TicketRejected) as caught:
        KEYS.open(forged)
    assert caught.value.reason == "TICKET_MALFORMED"


def test_a_ticket_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(TicketRejected, match="inconsistent"):
        KEYS.open(KEYS.seal(a_ticket(epochs=(1,))))


def test_a_fitting_ticket_passes() -> None:
    check(a_ticket())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fingerprint": KvLayout("digest", "bfloat16", 2, 3, 4, 16).fingerprint}, "TICKET_LAYOUT"),
        ({"scope": "u"}, "TICKET_SCOPE"),
        ({"tokens": TOKENS[:39]}, "TICKET_EXTENT"),
        ({"block_tokens": 8}, "TICKET_EXTENT"),
        ({"tokens": [9, *TOKENS[1:]]}, "TICKET_TOKENS"),
        ({"now_wall": 1000.0}, "TICKET_EXPIRED"),
    ],
)
def test_a_ticket_that_does_not_match_is_refused_by_name(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(TicketRejected) as caught:
        check(a_ticket(), **changes)
    assert caught.value.reason == reason


def test_a_layout_has_its_size_in_bytes() -> None:
    # Llama-3.1-8B in bfloat16: 128 KiB per token, 2 MiB per block of 16.
    layout = KvLayout("d", "bfloat16", 32, 8, 128, 16)
    assert (layout.token_bytes, layout.block_bytes) == (128 << 10, 2 << 20)


@pytest.mark.parametrize("field", ["model_digest", "dtype", "num_layers", "num_kv_heads", "head_dim", "block_tokens"])
def test_a_change_of_the_bytes_changes_the_fingerprint(field: str) -> None:
    changed = {"model_digest": "e", "dtype": "float16"}.get(field, 64)
    values = {name: getattr(LAYOUT, name) for name in KvLayout.__slots__}
    assert KvLayout(**{**values, field: changed}).fingerprint != LAYOUT.fingerprint


def test_a_ticket_of_the_first_version_opens_as_held_for_one_reader() -> None:
    sealed = bytes.fromhex(
        "6b7674314fbfe5cc8abb0b127ab7df34e8898f6d4e7ffd217d9f3d4e8fcc8db75b7d4f60d978d4f69cd92030313233343536"
        "37383961626364656630313233343536373839616263646566a970726566696c6c2d30b06665646362613938373635343332"
        "3130ad31302e302e302e353a39313030a46e69786cc410000102030405060708090a0b0c0d0e0fa874656e616e742d61c410"
        "8c00014a81bd644660fc2ea562931f4f119203ce001000009201cf0000010000000000cb41d954fc40200000"
    )
    ticket = Keyring([b"golden key, 16 bytes or more"]).open(sealed)
    assert (ticket.num_tokens, ticket.epochs) == (17, (1, 1 << 40))
    assert (ticket.held, ticket.readers, ticket.layout) == (True, 1, ())


def test_a_ticket_for_no_reader_contradicts_itself() -> None:
    with pytest.raises(TicketRejected, match="inconsistent"):
        KEYS.open(KEYS.seal(a_ticket(readers=0)))


OTHER = KvLayout("digest", "bfloat16", 2, 3, 4, 32)


def other_ticket(**changes: object) -> Ticket:
    """Return a ticket for 39 tokens in blocks of 32, in bfloat16."""
    whole = {"fingerprint": OTHER.fingerprint, "layout": OTHER.description, "block_ids": (4, 7), "epochs": (1, 2)}
    return a_ticket(**{**whole, **changes})


def test_a_ticket_of_a_layout_that_can_be_converted_passes_where_that_is_done() -> None:
    check(KEYS.open(KEYS.seal(other_ticket())), layout=LAYOUT)
    check(a_ticket(), layout=LAYOUT)
    made = plan_for(OTHER.fingerprint, OTHER.description, LAYOUT)
    assert made is not None
    assert (made.source, made.target) == (OTHER, LAYOUT)
    assert plan_for(LAYOUT.fingerprint, (), LAYOUT) is None


@pytest.mark.parametrize(
    ("ticket", "layout", "why"),
    [
        (other_ticket(), None, "needs equal layouts"),
        (other_ticket(held=False), LAYOUT, "needs equal layouts"),
        (other_ticket(layout=()), LAYOUT, "sent no description of it"),
        (other_ticket(layout=(9, "x")), LAYOUT, "is invalid"),
        (other_ticket(layout=LAYOUT.description), LAYOUT, "does not match its fingerprint"),
        (other_ticket(), KvLayout("digest", "float32", 3, 3, 4, 16), "differ in num_layers: the source has 2"),
        (other_ticket(), KvLayout("else", "float32", 2, 3, 4, 16), "differ in model_digest"),
    ],
)
def test_a_ticket_of_a_layout_that_cannot_is_refused(ticket: Ticket, layout: KvLayout | None, why: str) -> None:
    with pytest.raises(TicketRejected, match=why) as caught:
        check(ticket, layout=layout, fingerprint=(layout or LAYOUT).fingerprint)
    assert caught.value.reason == "TICKET_LAYOUT"


def test_a_converted_ticket_s_extent_is_counted_in_its_own_blocks() -> None:
    with pytest.raises(TicketRejected) as caught:
        check(other_ticket(block_ids=(4, 7, 9), epochs=(1, 2, 3)), layout=LAYOUT)
    assert caught.value.reason == "TICKET_EXTENT"
