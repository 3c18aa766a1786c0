"""Tokens of calls: a server accepts a token only with the right role's key, method and address."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import Unauthenticated
from kvferry.rpc.access.call_keys import CALLER_METADATA, CallSigner, CallVerifier, role_key
from kvferry.rpc.access.hosts import is_host
from kvferry.rpc.access.table import ALLOWED, CallerRole, may_call
from kvferry.v1 import decode_pb2, inference_pb2, kv_events_pb2, kv_transfer_pb2, prefill_pb2, worker_admin_pb2

SECRET, OLD_SECRET = b"s" * 32, b"o" * 32
METHOD = "/kvferry.v1.Prefill/Run"
ADDRESS = "10.0.0.7:9100"


def signer(role: CallerRole = CallerRole.GATEWAY, secret: bytes = SECRET) -> CallSigner:
    return CallSigner(role, role_key(secret, role))


def token(made: CallSigner, method: str = METHOD, audience: str = ADDRESS) -> str:
    ((key, value),) = made.metadata(method, audience)
    assert key == CALLER_METADATA
    return value


def verifier(address: str = ADDRESS, *hosts: str, secrets: tuple[bytes, ...] = (SECRET,)) -> CallVerifier:
    made = CallVerifier(secrets)
    made.listen_at(address, *hosts)
    return made


@pytest.mark.parametrize("role", CallerRole)
def test_a_token_shows_the_role_of_its_key(role: CallerRole) -> None:
    checks = verifier()
    for _ in range(2):  # computed first, and cached afterwards
        assert checks.verify(METHOD, token(signer(role))) is role


@given(st.text(max_size=600))
def test_no_other_text_is_a_token(text: str) -> None:
    with pytest.raises(Unauthenticated):
        verifier().verify(METHOD, text)


@given(st.integers(0, 200), st.sampled_from("0a zZ:"))
def test_a_token_altered_in_any_character_is_rejected(place: int, other: str) -> None:
    made = token(signer())
    place %= len(made)
    altered = made[:place] + other + made[place + 1 :]
    if altered == made:
        return
    with pytest.raises(Unauthenticated):
        verifier().verify(METHOD, altered)


def test_a_token_is_for_one_method_and_one_address() -> None:
    with pytest.raises(Unauthenticated):
        verifier().verify("/kvferry.v1.Decode/Run", token(signer()))
    for address in ("10.0.0.8:9100", "10.0.0.7:9101", "127.0.0.1:9100"):
        with pytest.raises(Unauthenticated) as caught:
            verifier().verify(METHOD, token(signer(), audience=address))
        assert caught.value.reason == "CALLER_AUDIENCE"
        assert "--advertise-host" in caught.value.message


@pytest.mark.parametrize(
    ("bound", "advertised", "audience", "accepted"),
    [
        ("0.0.0.0:9100", "10.0.0.7", "10.0.0.7:9100", True),
        ("0.0.0.0:9100", "10.0.0.7", "127.0.0.1:9100", True),
        ("0.0.0.0:9100", "10.0.0.7", "10.0.0.8:9100", False),
        ("0.0.0.0:9100", "", "10.0.0.8:9100", False),
        ("0.0.0.0:9100", "", "127.0.0.1:9100", True),
        ("0.0.0.0:9100", "", "worker-0.pool:9100", True),
        ("0.0.0.0:9100", "nowhere.invalid", "10.0.0.8:9100", False),
        ("[::]:9100", "fd00::7", "[fd00::7]:9100", True),
        ("[::]:9100", "fd00::7", "[fd00:0::7]:9100", True),
        ("[::]:9100", "fd00::7", "[fd00::8]:9100", False),
        ("localhost:9100", "", "localhost:9100", True),
        ("localhost:9100", "", "127.0.0.1:9100", True),
        ("localhost:9100", "", "10.0.0.8:9100", False),
        ("10.0.0.7:9100", "", "worker-0.pool:9100", True),
        ("10.0.0.7:9100", "", "ipv4:10.0.0.8:9100", False),
        ("10.0.0.7:9100", "", "10.0.0.007:9100", False),
        ("10.0.0.7:9100", "", "dns://server/name:9100", False),
        ("10.0.0.7:9100", "", ":9100", False),
    ],
)
def test_an_audience_is_an_address_of_the_server(bound: str, advertised: str, audience: str, accepted: bool) -> None:
    checks = verifier(bound, *([advertised] if advertised else []))
    made = token(signer(), audience=audience)
    if accepted:
        assert checks.verify(METHOD, made) is CallerRole.GATEWAY
    else:
        with pytest.raises(Unauthenticated):
            checks.verify(METHOD, made)


def test_workers_reach_each_other_only_by_advertised_names() -> None:
    checks = verifier("10.0.0.7:9100", "worker-0.pool")
    for name, accepted in (("worker-0.pool", True), ("attacker.example", False)):
        made = token(signer(CallerRole.WORKER), audience=f"{name}:9100")
        if accepted:
            assert checks.verify(METHOD, made) is CallerRole.WORKER
        else:
            with pytest.raises(Unauthenticated):
                checks.verify(METHOD, made)


@pytest.mark.parametrize("text", ["10.0.0.5", "fd00::7", "[fd00::7]", "worker-0", "worker_0.pool.svc.", "localhost"])
def test_hosts_are_addresses_and_names(text: str) -> None:
    assert is_host(text)


@pytest.mark.parametrize("text", ["", "10.0.0.5:9100", "a b", "http://x", "10.0.0.300", "a,b", "-x", "ipv4:1.2.3.4"])
def test_nothing_else_is_a_host(text: str) -> None:
    assert not is_host(text)


def test_a_token_with_other_characters_is_rejected() -> None:
    made = token(signer())
    with pytest.raises(Unauthenticated):
        verifier().verify(METHOD, made[:-1] + "é")


def test_secrets_are_rotated_one_after_the_other() -> None:
    both = verifier(secrets=(SECRET, OLD_SECRET))
    for secret in (SECRET, OLD_SECRET):
        assert both.verify(METHOD, token(signer(secret=secret))) is CallerRole.GATEWAY
    with pytest.raises(Unauthenticated) as caught:
        verifier().verify(METHOD, token(signer(secret=OLD_SECRET)))
    assert caught.value.reason == "CALLER_KEY_UNKNOWN"
    assert "kvferry key gateway" in caught.value.message


def test_a_role_cannot_use_the_key_of_another() -> None:
    stolen = CallSigner(CallerRole.OPERATOR, role_key(SECRET, CallerRole.GATEWAY))
    with pytest.raises(Unauthenticated):
        verifier().verify(METHOD, token(stolen))


def test_a_proof_is_for_one_caller_address_and_nonce() -> None:
    checks, gateway = verifier(), signer()
    proof = checks.proof(token(gateway), b"nonce")
    assert gateway.proves(proof, ADDRESS, b"nonce")
    assert not gateway.proves(proof, ADDRESS, b"other")
    assert not gateway.proves(proof, "10.0.0.8:9100", b"nonce")
    assert not signer(CallerRole.OPERATOR).proves(proof, ADDRESS, b"nonce")
    assert not gateway.proves(b"", ADDRESS, b"nonce")
    assert checks.proof(token(gateway), b"") == b""


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        role_key(b"short", CallerRole.GATEWAY)


def test_every_method_of_a_worker_is_in_the_table() -> None:
    files = (decode_pb2, inference_pb2, kv_events_pb2, kv_transfer_pb2, prefill_pb2, worker_admin_pb2)
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(ALLOWED) == methods
    assert not any(may_call(role, "/kvferry.v1.Prefill/New") for role in CallerRole)
