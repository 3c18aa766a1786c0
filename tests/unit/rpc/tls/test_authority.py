"""Certificates of a pool's CA, verified by an independent library."""

import sys
from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from harness.servers.pool_certificates import DAY, NOW, an_authority

from kvferry.core.errors import UsageError
from kvferry.rpc.tls.authority import GATEWAY_NAME, WORKER_NAME, Authority, facts_of


def test_a_certificate_names_the_kind_of_process_and_serves_both_purposes() -> None:
    authority = an_authority()
    signed = authority.sign(WORKER_NAME, NOW, 30)
    found = x509.load_pem_x509_certificate(signed.certificate.encode())
    issuer = x509.load_pem_x509_certificate(authority.certificate.encode())
    found.verify_directly_issued_by(issuer)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [WORKER_NAME]
    purposes = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(purposes) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    key = serialization.load_pem_private_key(signed.key.encode(), None)
    assert key.public_key() == found.public_key()
    assert found.not_valid_after_utc == datetime.fromtimestamp(int(NOW + 30 * DAY), UTC)


def test_a_ca_signs_certificates_only_below_itself() -> None:
    issuer = x509.load_pem_x509_certificate(an_authority().certificate.encode())
    limits = issuer.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (limits.critical, limits.value.ca, limits.value.path_length) == (True, True, 0)
    usage = issuer.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.key_cert_sign
    assert not usage.digital_signature


def test_certificates_are_not_valid_for_longer_than_their_ca() -> None:
    authority = Authority.draw(NOW, 5)
    (facts,) = facts_of(authority.sign(GATEWAY_NAME, NOW, 90).certificate)
    (of_ca,) = facts_of(authority.certificate)
    assert facts.not_after == of_ca.not_after
    assert facts.names == (GATEWAY_NAME,)
    assert facts.issuer == of_ca.issuer


def test_two_cas_of_one_title_differ() -> None:
    first, second = an_authority(), an_authority()
    assert [f.fingerprint for f in facts_of(first.certificate + second.certificate)] == [
        facts_of(each.certificate)[0].fingerprint for each in (first, second)
    ]
    assert facts_of(first.certificate)[0].issuer != facts_of(second.certificate)[0].issuer


def test_keys_are_not_shown() -> None:
    authority = an_authority()
    assert "PRIVATE" not in repr(authority) + repr(authority.sign(WORKER_NAME, NOW, 1))


def test_an_expired_a_foreign_and_a_malformed_ca_cannot_sign() -> None:
    expired, other = Authority.draw(NOW - 10 * DAY, 5), an_authority()
    with pytest.raises(UsageError, match="expired"):
        expired.sign(WORKER_NAME, NOW, 1)
    with pytest.raises(UsageError, match="does not belong"):
        Authority(other.certificate, expired.key).sign(WORKER_NAME, NOW, 1)
    with pytest.raises(UsageError, match="kvferry key ca"):
        Authority("x", other.key).sign(WORKER_NAME, NOW, 1)


@pytest.mark.parametrize("days", [0, -1, 40_000, float("nan")])
def test_the_validity_has_bounds(days: float) -> None:
    with pytest.raises(UsageError, match="days"):
        Authority.draw(NOW, days)


def test_texts_without_certificates_are_refused() -> None:
    for text in ("", "x", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        with pytest.raises(UsageError, match="no certificates"):
            facts_of(text)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    with pytest.raises(UsageError, match=r"kvferry\[encryption\]"):
        Authority.draw(NOW, 1)
