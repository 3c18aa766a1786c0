"""Everything around a pool's pods: Services, accounts and their rights, budgets, policies, monitors, scalers."""

from kvferry.operator import names
from kvferry.operator.gateway_pods import can_sleep
from kvferry.operator.pods import child
from kvferry.operator.spec import Json, Pool, Role

POD_MONITOR = ("monitoring.coreos.com/v1", "podmonitors")
EXTENSION_POOL = ("inference.networking.k8s.io/v1", "inferencepools")


def surroundings(pool: Pool, installed: frozenset[tuple[str, str]]) -> list[Json]:
    """The objects that a pool has whatever its revision, in the order in which they are applied.

    Args:
        installed: kinds of others that the cluster has, as (apiVersion, plural).
    """
    made = [*_accounts(pool), *_services(pool), *_budgets(pool)]
    if pool.spec.network_policy == "Restricted":
        made.append(_network_policy(pool))
    if pool.spec.observability.pod_monitor == "Auto" and POD_MONITOR in installed:
        made.append(_pod_monitor(pool))
    if pool.spec.gateway.inference_extension == "Auto" and EXTENSION_POOL in installed:
        made.append(_extension_pool(pool))
    return made


def scaler(pool: Pool, role: Role, replicas: int | None) -> Json:
    """The scaler of a role; without `replicas` the number is left to whoever owns it."""
    made = child(
        pool,
        names.API_VERSION,
        "PoolRoleScaler",
        names.role_object(pool.name, role.name),
        role.name,
        spec={"pool": pool.name, "role": role.name},
    )
    sleeps = role.scaling.mode != "Static" and role.scaling.min_replicas == 0
    made["metadata"]["annotations"] = {names.ANNOTATION_WAKE: "true" if sleeps else "false"}
    if replicas is not None:
        made["spec"]["replicas"] = replicas
    return made


def _accounts(pool: Pool) -> list[Json]:
    rules: list[Json] = [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]
    if can_sleep(pool):
        scalers = [names.role_object(pool.name, role.name) for role in pool.spec.roles]
        rules += [
            {"apiGroups": [names.GROUP], "resources": [names.SCALERS], "resourceNames": scalers, "verbs": ["get"]},
            {
                "apiGroups": [names.GROUP],
                "resources": [f"{names.SCALERS}/scale"],
                "resourceNames": scalers,
                "verbs": ["get", "patch"],
            },
        ]
    gateway = f"{pool.name}-gateway"
    rbac = "rbac.authorization.k8s.io/v1"
    return [
        child(pool, "v1", "ServiceAccount", f"{pool.name}-worker", automountServiceAccountToken=False),
        child(pool, "v1", "ServiceAccount", gateway),
        child(pool, rbac, "Role", gateway, rules=rules),
        child(
            pool,
            rbac,
            "RoleBinding",
            gateway,
            roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": gateway},
            subjects=[{"kind": "ServiceAccount", "name": gateway, "namespace": pool.namespace}],
        ),
    ]


def _services(pool: Pool) -> list[Json]:
    service = pool.spec.gateway.service
    http, grpc = ("https", "grpcs") if pool.spec.gateway.tls_secret else ("http", "kubernetes.io/h2c")
    made = [
        child(
            pool,
            "v1",
            "Service",
            pool.name,
            names.ROLE_GATEWAY,
            spec={
                "type": service.type,
                "selector": {names.LABEL_POOL: pool.name, names.LABEL_ROLE: names.ROLE_GATEWAY},
                "ports": [
                    {"name": "http", "port": service.http_port, "targetPort": "http", "appProtocol": http},
                    {
                        "name": "grpc",
                        "port": service.grpc_port,
                        "targetPort": "grpc",
                        "appProtocol": grpc,
                    },
                ],
            },
        )
    ]
    if service.annotations:
        made[0]["metadata"]["annotations"] = dict(service.annotations)
    made += [
        child(
            pool,
            "v1",
            "Service",
            names.role_object(pool.name, role.name),
            role.name,
            spec={
                # No address of its own: the gateway reads the endpoints and asks each pod itself.
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {names.LABEL_POOL: pool.name, names.LABEL_ROLE: role.name},
                "ports": [
                    {"name": "grpc", "port": names.PORT_GRPC, "targetPort": "grpc"},
                    {"name": "admin", "port": names.PORT_ADMIN, "targetPort": "admin"},
                ],
            },
        )
        for role in pool.spec.roles
    ]
    return made


def _budgets(pool: Pool) -> list[Json]:
    amount = pool.spec.disruption.max_unavailable
    value: int | str = amount if amount.endswith("%") else int(amount)
    return [
        child(
            pool,
            "policy/v1",
            "PodDisruptionBudget",
            names.role_object(pool.name, role),
            role,
            spec={
                "maxUnavailable": value,
                "selector": {"matchLabels": {names.LABEL_POOL: pool.name, names.LABEL_ROLE: role}},
            },
        )
        for role in (*(role.name for role in pool.spec.roles), names.ROLE_GATEWAY)
    ]


def _network_policy(pool: Pool) -> Json:
    return child(
        pool,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        f"{pool.name}-workers",
        spec={
            "podSelector": {
                "matchLabels": {names.LABEL_POOL: pool.name},
                "matchExpressions": [
                    {"key": names.LABEL_ROLE, "operator": "In", "values": [role.name for role in pool.spec.roles]}
                ],
            },
            "policyTypes": ["Ingress"],
            "ingress": [
                # Gateways call, and workers read each other's pages on ports that the transport chooses.
                {"from": [{"podSelector": {"matchLabels": {names.LABEL_POOL: pool.name}}}]},
                {"ports": [{"port": names.PORT_METRICS, "protocol": "TCP"}]},
            ],
        },
    )


def _pod_monitor(pool: Pool) -> Json:
    made = child(
        pool,
        POD_MONITOR[0],
        "PodMonitor",
        pool.name,
        spec={
            "selector": {"matchLabels": {names.LABEL_POOL: pool.name}},
            "podTargetLabels": [names.LABEL_POOL, names.LABEL_ROLE, names.LABEL_REVISION],
            "podMetricsEndpoints": [
                {"port": "metrics", "interval": "5s"},
                {"port": "http", "interval": "5s", **_tls(pool)},
            ],
        },
    )
    made["metadata"]["labels"] |= pool.spec.observability.pod_monitor_labels
    return made


def _tls(pool: Pool) -> Json:
    """Scraped by the pods' addresses, which no certificate names."""
    if not pool.spec.gateway.tls_secret:
        return {}
    return {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}


def _extension_pool(pool: Pool) -> Json:
    """Stands for the gateway pods, any of which takes any request, so that nobody has to pick one.

    The definition wants a picker all the same. Named is our own Service, whose gRPC port knows nothing of picking,
    and FailOpen lets requests through to any pod then. The protocol is left at its default, HTTP/1.1: releases before
    1.4 do not know the field.
    """
    return child(
        pool,
        EXTENSION_POOL[0],
        "InferencePool",
        pool.name,
        spec={
            "selector": {"matchLabels": {names.LABEL_POOL: pool.name, names.LABEL_ROLE: names.ROLE_GATEWAY}},
            "targetPorts": [{"number": names.GATEWAY_HTTP}],
            "endpointPickerRef": {
                "name": pool.name,
                "port": {"number": pool.spec.gateway.service.grpc_port},
                "failureMode": "FailOpen",
            },
        },
    )
