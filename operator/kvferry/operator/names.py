"""Every name that the operator shares with the API server: kinds, labels, annotations, conditions, field managers."""

from enum import StrEnum

GROUP = "kvferry.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
POOLS = "inferencepools"
SCALERS = "poolrolescalers"

FIELD_MANAGER = "kvferry-operator"
SEED_MANAGER = "kvferry-operator-seed"
"""Owns a scaler's first number of replicas until somebody else writes one."""
AUTOSCALER_MANAGER = "kvferry-autoscaler"
GATEWAY_MANAGER = "kvferry-gateway"
"""Wakes a sleeping role: writes 1 where there was 0, nothing else."""
OWN_MANAGERS = frozenset({FIELD_MANAGER, SEED_MANAGER, AUTOSCALER_MANAGER, GATEWAY_MANAGER})
"""Among these a field changes hands without a conflict."""

LABEL_POOL = f"{GROUP}/pool"
LABEL_ROLE = f"{GROUP}/role"
LABEL_REVISION = f"{GROUP}/revision"
LABEL_SEEN = f"{GROUP}/seen-at"
"""Touched by the heartbeat, to come back through the watch. A label: an annotation would be a new generation of a
Deployment, and every reader would wait for its controller to see it."""
ANNOTATION_WAKE = f"{GROUP}/wake"
"""On a scaler: `true` lets the gateway write 1 over 0."""
ANNOTATION_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

ROLE_GATEWAY = "gateway"
WORKER_ROLES = {"prefill": "prefill", "decode": "decode", "combined": "both"}
"""Role in a pool to role of the worker process."""

PORT_GRPC = 9100
PORT_ADMIN = 9101
PORT_METRICS = 9102
GATEWAY_HTTP = 8000
GATEWAY_GRPC = 9000

NON_ROOT_UID = 65532


class Condition(StrEnum):
    """What is said about a pool. `Ready` sums up the others."""

    READY = "Ready"
    PROGRESSING = "Progressing"
    """True while pods move towards the wanted revision and number."""
    GATEWAY_READY = "GatewayReady"
    ROLES_READY = "RolesReady"
    """Every role has all the pods wanted of it, of the wanted revision, ready."""
    MODEL_AVAILABLE = "ModelAvailable"
    """Workers serve the model, with the digest asked for."""
    PAIRING_COMPATIBLE = "PairingCompatible"
    """Some prefill pod can hand KV to some decode pod, seen by the gateway."""
    TRANSPORT_DEGRADED = "TransportDegraded"
    """True: hand-offs are computed anew instead of fetched."""
    REPLICAS_CONTESTED = "ReplicasContested"
    """True: somebody else writes a number that the operator was told to write."""
    CHILDREN_APPLIED = "ChildrenApplied"
    """All objects around the pods are as the pool wants them."""
    GATEWAY_INTEGRATION = "GatewayIntegration"
    """An InferencePool of the Gateway API Inference Extension stands for this pool."""


def role_object(pool: str, role: str) -> str:
    """The name of a role's Service, scaler and disruption budget."""
    return f"{pool}-{role}"


def deployment_name(pool: str, role: str, revision: str) -> str:
    """The name of the Deployment of one role at one revision."""
    return f"{pool}-{role}-{revision}"


def keys_secret(pool: str) -> str:
    """The Secret that the operator draws when the pool names none."""
    return f"{pool}-keys"


def revision_object(pool: str, revision: str) -> str:
    """The ControllerRevision that remembers a revision."""
    return f"{pool}-{revision}"


def pool_labels(pool: str, role: str | None = None) -> dict[str, str]:
    """The labels of everything that belongs to a pool, or to one of its roles."""
    labels = {
        "app.kubernetes.io/name": "kvferry",
        "app.kubernetes.io/instance": pool,
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        LABEL_POOL: pool,
    }
    if role is not None:
        labels |= {"app.kubernetes.io/component": role, LABEL_ROLE: role}
    return labels
