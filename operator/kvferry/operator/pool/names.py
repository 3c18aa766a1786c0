"""Names in the Kubernetes API: kinds, labels, annotations, conditions, field managers."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

GROUP = "kvferry.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
POOLS = "inferencepools"
SCALERS = "poolrolescalers"
POOL_KIND = "InferencePool"
EXTENSION_KIND = "ExtensionPool"
"""Name in the operator for the kind InferencePool of the Gateway API Inference Extension."""
EXTENSION_GROUP = "inference.networking.k8s.io"

FIELD_MANAGER = "kvferry-operator"
SEED_MANAGER = "kvferry-operator-seed"
"""Field manager of the initial `spec.replicas` of a scaler, until a different field manager writes it."""
AUTOSCALER_MANAGER = "kvferry-autoscaler"
GATEWAY_MANAGER = "kvferry-gateway"
"""Field manager of gateways, which scale a role from 0 to 1 when they receive a request."""
PROBE_MANAGER = "kvferry-operator-watch-probe"
"""Field manager of the watch probe, which marks objects to verify their watches."""
RESET_MANAGER = "before-first-apply"
"""Field manager to which the API server assigns all fields of an object whose managed fields were cleared."""
OWN_MANAGERS = frozenset({FIELD_MANAGER, SEED_MANAGER, AUTOSCALER_MANAGER, GATEWAY_MANAGER, RESET_MANAGER})
"""Field managers whose fields the operator may take over; conflicts with other field managers are reported. Clearing
the managed fields of an object returns them to the operator.
"""

LABEL_POOL = f"{GROUP}/pool"
LABEL_ROLE = f"{GROUP}/role"
LABEL_REVISION = f"{GROUP}/revision"
LABEL_SEEN = f"{GROUP}/seen-at"
"""Label written by the watch probe. It is not an annotation, since that would increment the generation of a Deployment,
whose status would be stale until its controller has observed the change."""
LABEL_ADMIN_ACCESS = f"{GROUP}/admin-access"
"""Label of pods, set by users; `true` lets them connect to the admin ports of gateways."""
OPERATOR_APP = "kvferry-operator"
"""Value of the label `app.kubernetes.io/name` of the operator's pods, set by the chart."""
ANNOTATION_NAMESPACES = f"{GROUP}/namespaces"
"""Annotation of the operator's Lease: the namespaces whose pools it reconciles, with commas; empty for all."""
ANNOTATION_WAKE = f"{GROUP}/wake"
"""Annotation of a scaler; `true` allows the gateway to scale the role from 0 to 1."""
ANNOTATION_KEYS = f"{GROUP}/keys"
"""Annotation of pods: identifier of the generated keys, if the Secret was generated again."""
ANNOTATION_ACCOUNT = f"{GROUP}/account"
"""Annotation of gateway pods: uid of the ServiceAccount, if it was created again."""
ANNOTATION_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

ROLE_GATEWAY = "gateway"
WORKER_CONTAINER, GATEWAY_CONTAINER = "worker", "gateway"
"""Names of the containers of pods, by which templates change them."""
WORKER_ROLES = ("prefill", "decode", "both")
"""Roles of worker pods, the values of `kvferry worker --role`."""

PORT_GRPC = 9100
PORT_ADMIN = 9101
PORT_METRICS = 9102
PORT_HEALTH = 9103
"""Port for probes of workers with TLS, since probes cannot use TLS."""
GATEWAY_HTTP = 8000
GATEWAY_GRPC = 9000
GATEWAY_ADMIN = 8001

NON_ROOT_UID = 65532


class Condition(StrEnum):
    """Condition types of a pool. `Ready` summarizes the others."""

    READY = "Ready"
    AVAILABLE = "Available"
    """True if requests are served now, also during a rollout or with fewer pods than desired."""
    PROGRESSING = "Progressing"
    """True while a rollout is in progress."""
    GATEWAY_READY = "GatewayReady"
    ROLES_READY = "RolesReady"
    """True if all desired pods of every role are ready and run the target revision."""
    MODEL_AVAILABLE = "ModelAvailable"
    """True if workers serve the model with the required digest."""
    PAIRING_COMPATIBLE = "PairingCompatible"
    """True if the gateway reports at least one prefill pod that can hand off KV to a decode pod."""
    CONTEXT_AVAILABLE = "ContextAvailable"
    """True if the workers' memory for KV holds a request of the pool's context length."""
    ADAPTERS_LOADED = "AdaptersLoaded"
    """True if the workers that accept requests have loaded all adapters of the pool."""
    CERTIFICATES_VALID = "CertificatesValid"
    """True if the pool's certificates are valid for at least another week; absent without TLS."""
    TRANSPORT_DEGRADED = "TransportDegraded"
    """True if many hand-offs fail and are recomputed, or if pods have different ticket keys."""
    REPLICAS_CONTESTED = "ReplicasContested"
    """True if a different field manager owns a number of replicas that the operator should write."""
    CHILDREN_APPLIED = "ChildrenApplied"
    """True if all objects of the pool were applied."""
    GATEWAY_INTEGRATION = "GatewayIntegration"
    """True if an InferencePool of the Gateway API Inference Extension selects the gateway pods."""


def kind_of(manifest: Mapping[str, Any]) -> str:
    """Return the kind of an object; `EXTENSION_KIND` for the InferencePool of the inference extension."""
    is_extension = str(manifest["apiVersion"]).startswith(f"{EXTENSION_GROUP}/")
    return EXTENSION_KIND if is_extension else str(manifest["kind"])


def role_object(pool: str, role: str) -> str:
    """Return the name that a role's Service, scaler and disruption budget share."""
    return f"{pool}-{role}"


def deployment_name(pool: str, role: str, revision: str) -> str:
    """Return the name of the Deployment of a role at a revision."""
    return f"{pool}-{role}-{revision}"


def gateway_admin_ports(processes: int) -> list[str]:
    """Return the names of the admin ports of a gateway pod, one for each process; their numbers are consecutive."""
    return ["admin", *(f"admin-{number}" for number in range(1, processes))]


def worker_policy(pool: str) -> str:
    """Return the name of the NetworkPolicy of a pool's workers."""
    return f"{pool}-workers"


def gateway_policy(pool: str) -> str:
    """Return the name of the NetworkPolicy of a pool's gateways."""
    return f"{pool}-gateways"


def keys_secret(pool: str) -> str:
    """Return the name of the Secret that the operator creates for a pool without `spec.internalKeys.secretName`."""
    return f"{pool}-keys"


def tls_object(pool: str) -> str:
    """Return the name of the ConfigMap and of the Secret with the certificates of a pool with `spec.tls.mode`
    Managed."""
    return f"{pool}-tls"


def adapters_object(pool: str) -> str:
    """Return the name of the ConfigMap with a pool's list of adapters."""
    return f"{pool}-adapters"


def revision_object(pool: str, revision: str) -> str:
    """Return the name of a revision's ControllerRevision."""
    return f"{pool}-{revision}"


def pool_labels(pool: str, role: str | None = None) -> dict[str, str]:
    """Return the labels common to all objects of a pool, or of one of its roles."""
    labels = {
        "app.kubernetes.io/name": "kvferry",
        "app.kubernetes.io/instance": pool,
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        LABEL_POOL: pool,
    }
    if role is not None:
        labels |= {"app.kubernetes.io/component": role, LABEL_ROLE: role}
    return labels
