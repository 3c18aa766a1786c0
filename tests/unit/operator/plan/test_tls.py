"""Managed TLS of a pool: at any time each pod trusts every other one, whichever of its files have arrived."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from unit.operator.fake_cluster import Cluster

from kvferry.core.errors import Unavailable
from kvferry.operator.plan.process.fleet_page import read_fleet
from kvferry.operator.plan.tls_plan import RENEW_SECONDS, SPREAD_SECONDS, VALID_DAYS
from kvferry.operator.pool.tls_state import TlsState, data_of, read_state
from kvferry.rpc.tls.authority import Authority, facts_of

DAY = 86_400.0
CONFIG, SECRET = ("v1", "ConfigMap", "chat-tls"), ("v1", "Secret", "chat-tls")


def managed() -> Cluster:
    return Cluster(tls={"mode": "Managed"})


def bundle(cluster: Cluster) -> tuple[str, ...]:
    found = read_state(cluster.api.objects[CONFIG]["data"])
    assert found is not None
    return found.bundle


def certificates(cluster: Cluster) -> dict[str, str]:
    data = cluster.api.objects[SECRET]["data"]
    return {name: base64.b64decode(value).decode() for name, value in data.items()}


def trusts(cas: tuple[str, ...], certificate: str, at: float) -> bool:
    """Return whether a CA of the bundle signed a certificate and both are valid."""
    leaf = x509.load_pem_x509_certificate(certificate.encode())
    for ca in cas:
        issuer = x509.load_pem_x509_certificate(ca.encode())
        if issuer.subject == leaf.issuer:
            leaf.verify_directly_issued_by(issuer)
            ends = min(issuer.not_valid_after_utc, leaf.not_valid_after_utc).timestamp()
            return at < ends
    return False


class Pods:
    """Pods that get new files after a delay of 0 to SPREAD_SECONDS, each file on its own."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.seen: list[tuple[float, tuple[str, ...], str]] = []

    def look(self) -> None:
        now = self.cluster.clock.now
        is_there = SECRET in self.cluster.api.objects  # kubelet keeps the files of a deleted Secret
        certificate = certificates(self.cluster)["worker.crt"] if is_there else self.seen[-1][2]
        self.seen.append((now, bundle(self.cluster), certificate))
        latest_before = [entry for entry in self.seen if entry[0] <= now - SPREAD_SECONDS][-1:]
        possible = [*latest_before, *(entry for entry in self.seen if entry[0] > now - SPREAD_SECONDS)]
        for cas in {entry[1] for entry in possible}:
            for certificate in {entry[2] for entry in possible}:
                assert trusts(cas, certificate, now)

    def pass_time(self, seconds: float, step: float = 30.0) -> None:
        ends = self.cluster.clock.now + seconds
        while self.cluster.clock.now < ends:
            self.cluster.clock.now += step
            self.cluster.reconcile()
            self.look()


def test_a_new_pool_gets_certificates_in_its_first_pass() -> None:
    cluster = managed()
    writes = cluster.reconcile()
    assert writes.index("create Secret chat-tls") < writes.index("apply Deployment chat-gateway")
    found = certificates(cluster)
    assert set(found) == {"worker.crt", "worker.key", "gateway.crt", "gateway.key"}
    for kind in ("worker", "gateway"):
        (facts,) = facts_of(found[f"{kind}.crt"])
        assert facts.names == (f"{kind}.kvferry",)
        assert trusts(bundle(cluster), found[f"{kind}.crt"], cluster.clock.now)
        key = serialization.load_pem_private_key(found[f"{kind}.key"].encode(), None)
        assert key.public_key() == x509.load_pem_x509_certificate(found[f"{kind}.crt"].encode()).public_key()
    assert "PRIVATE" not in str(cluster.api.objects[CONFIG])
    assert "PRIVATE" not in str(cluster.executor.actions)
    cluster.settle()
    assert cluster.condition("CertificatesValid")[:2] == ("True", "Valid")
    assert cluster.body["status"]["tls"]["mode"] == "Managed"


def test_a_pool_without_tls_gets_no_tls_objects() -> None:
    cluster = Cluster()
    cluster.settle()
    assert not {CONFIG, SECRET} & cluster.api.objects.keys()
    assert "tls" not in cluster.body["status"]
    assert "CertificatesValid" not in {c["type"] for c in cluster.body["status"]["conditions"]}


def test_certificates_are_renewed_in_stages_that_pods_may_see_late() -> None:
    cluster = managed()
    cluster.settle()
    pods = Pods(cluster)
    cluster.clock.now += VALID_DAYS * DAY - RENEW_SECONDS - 600
    pods.look()
    pods.pass_time(500)
    first, before = bundle(cluster), certificates(cluster)
    assert len(first) == 1
    pods.pass_time(200)
    assert len(bundle(cluster)) == 2, "published"
    assert certificates(cluster) == before
    assert "renewal is in progress" in cluster.condition("CertificatesValid")[2]
    pods.pass_time(SPREAD_SECONDS)
    assert certificates(cluster) != before, "issued"
    assert len(bundle(cluster)) == 2
    pods.pass_time(SPREAD_SECONDS + 60)
    assert len(bundle(cluster)) == 1, "retired"
    assert bundle(cluster) != first
    settled = cluster.api.objects[CONFIG]["data"], certificates(cluster)
    pods.pass_time(600)
    assert (cluster.api.objects[CONFIG]["data"], certificates(cluster)) == settled


@pytest.mark.parametrize("again", range(0, 8, 2))
def test_an_operator_may_be_restarted_at_any_moment_of_a_renewal(again: int) -> None:
    cluster = managed()
    cluster.settle()
    pods = Pods(cluster)
    cluster.clock.now += VALID_DAYS * DAY - RENEW_SECONDS
    pods.look()
    for _ in range(3):
        pods.pass_time(60 + 70 * again)
        cluster.restart()
    before = certificates(cluster)
    pods.pass_time(4 * SPREAD_SECONDS + 120)
    assert len(bundle(cluster)) == 1
    (facts,) = facts_of(certificates(cluster)["worker.crt"])
    assert facts.not_after - cluster.clock.now > RENEW_SECONDS
    assert before  # in each state before the restart, every pod trusted the others


@pytest.mark.parametrize("writes", range(6))
def test_an_interrupted_renewal_is_continued(writes: int) -> None:
    """The API server fails after each write of the renewal in turn, and another operator continues."""
    cluster = managed()
    cluster.settle()
    pods = Pods(cluster)
    cluster.clock.now += VALID_DAYS * DAY - RENEW_SECONDS
    pods.look()
    cluster.api.fail_after = writes
    for _ in range(40):
        cluster.clock.now += 20
        try:
            cluster.reconcile()
        except Unavailable:
            cluster.api.fail_after = -1
            cluster.restart()
        pods.look()
    pods.pass_time(4 * SPREAD_SECONDS + 120)
    assert len(bundle(cluster)) == 1


@pytest.mark.parametrize("writes", range(12))
def test_an_interrupted_creation_is_continued(writes: int) -> None:
    cluster = managed()
    cluster.api.fail_after = writes
    try:
        cluster.reconcile()
    except Unavailable:
        cluster.api.fail_after = -1
        cluster.restart()
    cluster.api.fail_after = -1
    Pods(cluster)
    cluster.settle()
    for _ in range(30):
        cluster.clock.now += 20
        cluster.reconcile()
    assert trusts(bundle(cluster), certificates(cluster)["worker.crt"], cluster.clock.now)
    assert len(bundle(cluster)) == 1
    assert cluster.condition("ChildrenApplied")[0] == "True"


def test_a_deleted_secret_is_written_again_when_all_pods_trust_its_new_ca() -> None:
    cluster = managed()
    cluster.settle()
    pods = Pods(cluster)
    pods.look()
    first = cluster.api.objects.pop(SECRET)
    cluster.clock.now += 20
    cluster.reconcile()
    pods.look()
    assert SECRET not in cluster.api.objects, "running pods do not trust the new CA yet"
    assert len(bundle(cluster)) == 2
    pods.pass_time(SPREAD_SECONDS + 60)
    assert cluster.api.objects[SECRET]["metadata"]["uid"] != first["metadata"]["uid"]
    pods.pass_time(SPREAD_SECONDS + 60)
    assert len(bundle(cluster)) == 1


def test_a_changed_bundle_is_corrected() -> None:
    cluster = managed()
    cluster.settle()
    kept = dict(cluster.api.objects[CONFIG]["data"])
    foreign = Authority.draw(cluster.clock.now, 90).certificate
    cluster.api.objects[CONFIG]["data"]["ca.crt"] = foreign
    cluster.api.objects[CONFIG]["metadata"]["generation"] += 1
    cluster.reconcile()
    assert cluster.api.objects[CONFIG]["data"] == kept
    del cluster.api.objects[CONFIG]
    cluster.reconcile()
    assert cluster.api.objects[CONFIG]["data"] == kept


@pytest.mark.parametrize("place", [SECRET, CONFIG])
def test_objects_of_others_are_not_changed(place: tuple[str, str, str]) -> None:
    cluster = managed()
    api_version, kind, name = place
    other: dict[str, Any] = {"apiVersion": api_version, "kind": kind, "data": {"mine": "eA=="}}
    cluster.api.add({**other, "metadata": {"name": name, "namespace": "team"}})
    for _ in range(3):
        cluster.reconcile()
    assert cluster.api.objects[place]["data"] == {"mine": "eA=="}
    status, reason, message = cluster.condition("ChildrenApplied")
    assert (status, reason) == ("False", "Refused")
    assert f"{kind} chat-tls" in message
    assert "does not belong to this pool" in message


def test_a_secret_that_another_writer_made_again_is_not_changed() -> None:
    cluster = managed()
    cluster.settle()
    cluster.api.objects[SECRET]["metadata"]["uid"] = "of another"
    cluster.api.objects[SECRET]["data"] = {"mine": "eA=="}
    cluster.clock.now += VALID_DAYS * DAY - RENEW_SECONDS
    for _ in range(15):
        cluster.clock.now += 20
        cluster.reconcile()
    assert cluster.api.objects[SECRET]["data"] == {"mine": "eA=="}
    assert "Secret chat-tls exists and does not belong to this pool" in cluster.condition("ChildrenApplied")[2]


def test_expiring_certificates_are_reported_with_a_remedy() -> None:
    cluster = Cluster(tls={"mode": "Secret", "secretName": "mine"})
    cluster.settle()
    assert cluster.condition("CertificatesValid")[:2] == ("Unknown", "NotReportedYet")
    assert "chat-tls" not in str(cluster.api.writes)
    page = {"workers": [], "pool_certificate_not_after": int(cluster.clock.now + 5 * DAY)}
    cluster.report = read_fleet(json.dumps(page).encode(), cluster.clock.now)
    cluster.reconcile()
    status, reason, message = cluster.condition("CertificatesValid")
    assert (status, reason) == ("False", "Expiring")
    assert "spec.tls.secretName" in message
    assert cluster.body["status"]["tls"] == {"mode": "Secret", "notAfter": "1970-01-06T00:16:43Z"}


def states() -> Iterator[TlsState]:
    yield TlsState()
    first, second = (Authority.draw(0, 9).certificate for _ in range(2))
    published = TlsState().published(first, 1.5)
    yield published
    yield published.issued(2.25, 99.0, "u").published(second, 7.0)


@pytest.mark.parametrize("state", list(states()))
def test_a_state_is_read_as_it_was_written(state: TlsState) -> None:
    assert read_state(data_of(state)) == state


@pytest.mark.parametrize("text", ["", "x", "[]", '{"issuedAt": "x"}', "[" * 100_000])
def test_invalid_state_is_ignored(text: str) -> None:
    assert read_state({"state.json": text}) is None
    assert read_state({}) is None


def test_the_bundle_is_bounded_and_keeps_the_issuer() -> None:
    cas = [Authority.draw(0, 9).certificate for _ in range(12)]
    state = TlsState().published(cas[0], 0).issued(0, 1, "u")
    for ca in cas[1:]:
        state = state.published(ca, 0)
    assert len(state.bundle) == 6
    assert (state.bundle[0], state.bundle[-1]) == (cas[0], cas[-1])
    assert state.without_earlier().bundle == (cas[0],)
