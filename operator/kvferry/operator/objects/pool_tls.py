"""TLS of a pool's pods: the ConfigMap and the Secret that the operator writes, and the volumes and flags of the pods.

    mode Managed   Secret POOL-tls: worker.crt, worker.key, gateway.crt, gateway.key; ConfigMap POOL-tls: ca.crt
    mode Secret    the user's Secret: tls.crt, tls.key, ca.crt

Both are mounted as one folder with tls.crt, tls.key and ca.crt. kubelet updates the files of running pods, which read
them again.
"""

from kvferry.operator.objects.pods import child
from kvferry.operator.pool import names
from kvferry.operator.pool.spec import InferencePool, Json
from kvferry.operator.pool.tls_state import CA_ENTRY, TlsState, data_of

_FOLDER = "/etc/kvferry/pool-tls"
WORKER, GATEWAY = "worker", "gateway"


def tls_config(pool: InferencePool, state: TlsState) -> Json:
    """Build the ConfigMap with the CA bundle."""
    return child(pool, "v1", "ConfigMap", names.tls_object(pool.name), data=data_of(state))


def tls_secret(pool: InferencePool) -> Json:
    """Build the Secret for the certificates and keys, without data."""
    return child(pool, "v1", "Secret", names.tls_object(pool.name), type="Opaque")


def tls_volume(pool: InferencePool, kind: str) -> tuple[list[Json], list[Json]]:
    """Return the volume and mount of a pod's files, or empty lists without TLS.

    Args:
        pool: the pool.
        kind: kind of process, `worker` or `gateway`; a gateway does not get the key of workers.
    """
    tls = pool.spec.tls
    if tls.mode == "Off":
        return [], []
    if tls.mode == "Secret":
        own = {"tls.crt": "tls.crt", "tls.key": "tls.key", CA_ENTRY: CA_ENTRY}
        sources = [{"secret": {"name": tls.secret_name, "items": _items(own)}}]
    else:
        name = names.tls_object(pool.name)
        pair = {f"{kind}.crt": "tls.crt", f"{kind}.key": "tls.key"}
        sources = [
            {"secret": {"name": name, "items": _items(pair)}},
            {"configMap": {"name": name, "items": _items({CA_ENTRY: CA_ENTRY})}},
        ]
    volume = {"name": "pool-tls", "projected": {"sources": sources}}
    return [volume], [{"name": "pool-tls", "mountPath": _FOLDER, "readOnly": True}]


def tls_flags(pool: InferencePool) -> dict[str, object]:
    """Return the TLS flags for the command line of a pod; empty if the pool's TLS mode is Off."""
    if pool.spec.tls.mode == "Off":
        return {}
    return {
        "pool-tls-cert-file": f"{_FOLDER}/tls.crt",
        "pool-tls-key-file": f"{_FOLDER}/tls.key",
        "pool-tls-ca-file": f"{_FOLDER}/{CA_ENTRY}",
    }


def _items(paths: dict[str, str]) -> list[Json]:
    return [{"key": key, "path": path} for key, path in paths.items()]
