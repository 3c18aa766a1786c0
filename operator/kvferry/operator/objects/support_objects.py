"""Objects of a pool besides Deployments: Services, ServiceAccounts, Roles, PodDisruptionBudgets, policies, monitors,
scalers."""

from kvferry.operator.objects.adapter_list import adapter_list
from kvferry.operator.objects.gateway_pods import can_scale_to_zero
from kvferry.operator.objects.pods import child
from kvferry.operator.pool import names
from kvferry.operator.pool.spec import InferencePool, Json, RoleSpec

POD_MONITOR = ("monitoring.coreos.com/v1", "podmonitors")
EXTENSION_POOL = ("inference.networking.k8s.io/v1", "inferencepools")


def surroundings(pool: InferencePool, installed: frozenset[tuple[str, str]]) -> list[Json]:
    """Build the objects that do not depend on the revision, in the order in which they are applied.

    Args:
        pool: the pool.
        installed: optional kinds that the cluster serves, as (apiVersion, plural).
    """
    made = [*_accounts(pool), *_services(pool), *_budgets(pool), adapter_list(pool)]
    if pool.spec.network_policy == "Restricted":
        made += [_worker_policy(pool), _gateway_policy(pool)]
    if pool.spec.observability.pod_monitor == "Auto" and POD_MONITOR in installed:
        made.append(_pod_monitor(pool))
    if pool.spec.gateway.inference_extension == "Auto" and EXTENSION_POOL in installed:
        made.append(_extension_pool(pool))
    return made


def scaler(pool: InferencePool, role: RoleSpec, replicas: int | None) -> Json:
    """Build the PoolRoleScaler of a role. If `replicas` is `None`, the field keeps its owner and value."""
    made = child(
        pool,
        names.API_VERSION,
        "PoolRoleScaler",
        names.role_object(pool.name, role.name),
        role.name,
        spec={"pool": pool.name, "role": role.name},
    )
    can_wake = role.scaling.mode != "Static" and role.scaling.min_replicas == 0
    made["metadata"]["annotations"] = {names.ANNOTATION_WAKE: "true" if can_wake else "false"}
    if replicas is not None:
        made["spec"]["replicas"] = replicas
    return made


def _accounts(pool: InferencePool) -> list[Json]:
    rules: list[Json] = [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]
    if can_scale_to_zero(pool):
        scalers = [names.role_object(pool.name, role.name) for role in pool.spec.roles]
        # A gateway looks for the scalers of all roles, and reports a refusal as a failure to scale the pool up.
        every = [names.role_object(pool.name, role) for role in names.WORKER_ROLES]
        rules += [
            {"apiGroups": [names.GROUP], "resources": [names.SCALERS], "resourceNames": every, "verbs": ["get"]},
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


def _services(pool: InferencePool) -> list[Json]:
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
    made.append(
        child(
            pool,
            "v1",
            "Service",
            names.role_object(pool.name, names.ROLE_GATEWAY),
            names.ROLE_GATEWAY,
            # The admin port is read without authentication, so it is not in the client Service, whose type may be
            # LoadBalancer.
            spec={
                "type": "ClusterIP",
                "selector": {names.LABEL_POOL: pool.name, names.LABEL_ROLE: names.ROLE_GATEWAY},
                "ports": [{"name": "admin", "port": names.GATEWAY_ADMIN, "targetPort": "admin"}],
            },
        )
    )
    return [*made, *(_role_service(pool, role) for role in pool.spec.roles)]


def _role_service(pool: InferencePool, role: RoleSpec) -> Json:
    return child(
        pool,
        "v1",
        "Service",
        names.role_object(pool.name, role.name),
        role.name,
        spec={
            # Headless: the gateway reads the endpoints and connects to each pod.
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_POOL: pool.name, names.LABEL_ROLE: role.name},
            "ports": [
                {"name": "grpc", "port": names.PORT_GRPC, "targetPort": "grpc"},
                {"name": "admin", "port": names.PORT_ADMIN, "targetPort": "admin"},
            ],
        },
    )


def _budgets(pool: InferencePool) -> list[Json]:
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


def _worker_policy(pool: InferencePool) -> Json:
    return child(
        pool,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        names.worker_policy(pool.name),
        spec={
            "podSelector": {
                "matchLabels": {names.LABEL_POOL: pool.name},
                "matchExpressions": [
                    {"key": names.LABEL_ROLE, "operator": "In", "values": [role.name for role in pool.spec.roles]}
                ],
            },
            "policyTypes": ["Ingress"],
            "ingress": [
                # Gateways connect to workers, and workers connect to each other on ports chosen by the transport.
                {"from": [{"podSelector": {"matchLabels": {names.LABEL_POOL: pool.name}}}]},
                {"ports": [{"port": names.PORT_METRICS, "protocol": "TCP"}]},
            ],
        },
    )


def _gateway_policy(pool: InferencePool) -> Json:
    """Build the policy of gateways: clients come from everywhere, the admin ports are for the operator and monitoring,
    in any namespace."""

    def pods(label: str, value: str) -> Json:
        return {"namespaceSelector": {}, "podSelector": {"matchLabels": {label: value}}}

    def tcp(*ports: int) -> list[Json]:
        return [{"port": port, "protocol": "TCP"} for port in ports]

    admin = range(names.GATEWAY_ADMIN, names.GATEWAY_ADMIN + pool.spec.gateway.processes)
    return child(
        pool,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        names.gateway_policy(pool.name),
        spec={
            "podSelector": {"matchLabels": {names.LABEL_POOL: pool.name, names.LABEL_ROLE: names.ROLE_GATEWAY}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": tcp(names.GATEWAY_HTTP, names.GATEWAY_GRPC)},
                {
                    "from": [
                        pods("app.kubernetes.io/name", names.OPERATOR_APP),
                        pods("app.kubernetes.io/name", "prometheus"),
                        pods(names.LABEL_ADMIN_ACCESS, "true"),
                    ],
                    "ports": tcp(*admin),
                },
            ],
        },
    )


def _pod_monitor(pool: InferencePool) -> Json:
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
                *({"port": port, "interval": "5s"} for port in names.gateway_admin_ports(pool.spec.gateway.processes)),
            ],
        },
    )
    made["metadata"]["labels"] |= pool.spec.observability.pod_monitor_labels
    return made


def _extension_pool(pool: InferencePool) -> Json:
    """Build the inference extension's InferencePool, which selects the gateway pods. Every gateway accepts every
    request.

    The schema requires an endpoint picker. The reference points to the pool's Service, which does not implement an
    endpoint picker, so FailOpen routes requests to any pod. The protocol keeps its default, HTTP/1.1, since releases
    before 1.4 do not have the field.
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
