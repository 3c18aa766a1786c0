"""Certificate files of a process at its start: files that peers would refuse are refused with the cause."""

from pathlib import Path

import pytest
from harness.servers.pool_certificates import DAY, NOW, PoolFolder, an_authority

from kvferry.core.errors import UsageError
from kvferry.rpc.tls.certificate_files import CertificateFiles, read_credentials


@pytest.fixture
def pool(tmp_path: Path) -> PoolFolder:
    return PoolFolder(tmp_path, an_authority())


@pytest.mark.parametrize(("kind", "is_worker"), [("worker", True), ("worker", False), ("gateway", False)])
def test_valid_files_are_read(pool: PoolFolder, kind: str, is_worker: bool) -> None:
    files = pool.files(kind)
    found = read_credentials(files, is_worker=is_worker)
    assert found.not_after == int(NOW + 10 * DAY)
    assert (found.chain, found.key, found.ca) == tuple(p.read_bytes() for p in (files.chain, files.key, files.ca))
    assert "PRIVATE" not in repr(found)


def refused(files: CertificateFiles, *, is_worker: bool = True) -> tuple[str, str]:
    with pytest.raises(UsageError) as caught:
        read_credentials(files, is_worker=is_worker)
    return caught.value.field, caught.value.message


@pytest.mark.parametrize("is_worker", [True, False])
def test_an_expired_certificate(pool: PoolFolder, is_worker: bool, tmp_path: Path) -> None:
    authority = an_authority()
    pool.trust(authority)
    files = pool.issue("worker", authority, age_days=20)
    field, message = refused(files, is_worker=is_worker)
    assert field == "pool_tls_cert_file"
    assert f"{files.chain} has expired" in message


def test_a_certificate_that_is_not_valid_yet(pool: PoolFolder) -> None:
    authority = an_authority()
    pool.trust(authority)
    assert "not valid yet" in refused(pool.issue("worker", authority, age_days=-2))[1]


@pytest.mark.parametrize("is_worker", [True, False])
def test_a_certificate_of_another_ca(pool: PoolFolder, is_worker: bool) -> None:
    files = pool.issue("worker", an_authority("another"))
    assert "is not signed by a CA of the bundle" in refused(files, is_worker=is_worker)[1]


def test_a_bundle_of_several_cas(pool: PoolFolder) -> None:
    other = an_authority("another")
    pool.trust(an_authority(), other)
    assert read_credentials(pool.issue("worker", other), is_worker=True)


def test_a_gateways_certificate_does_not_serve_a_worker(pool: PoolFolder) -> None:
    assert "does not have the name worker.kvferry" in refused(pool.files("gateway"))[1]


def test_a_key_of_another_certificate(pool: PoolFolder) -> None:
    files = pool.files("worker")
    field, message = refused(CertificateFiles(files.chain, pool.files("gateway").key, files.ca))
    assert field == "pool_tls_cert_file"
    assert "gateway.key does not belong" in message


def test_missing_and_malformed_files_are_named(pool: PoolFolder, tmp_path: Path) -> None:
    files, missing = pool.files("worker"), tmp_path / "missing"
    assert "missing" in refused(CertificateFiles(missing, files.key, files.ca))[1]
    assert "missing" in refused(CertificateFiles(files.chain, missing, files.ca))[1]
    assert "missing" in refused(CertificateFiles(files.chain, files.key, missing))[1]
    assert refused(CertificateFiles(files.chain, files.key, files.key))[0] == "pool_tls_ca_file"
    assert "expected a PEM certificate" in refused(CertificateFiles(files.key, files.key, files.ca))[1]
    (tmp_path / "large").write_bytes(b"x" * ((1 << 20) + 1))
    assert "larger than" in refused(CertificateFiles(tmp_path / "large", files.key, files.ca))[1]
