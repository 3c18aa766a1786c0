"""Gateway Deployment of a pool. Kubernetes itself rolls it out, since every gateway can use every worker."""

from kvferry.operator.objects.keys import ADMIN_ENTRY
from kvferry.operator.objects.pods import (
    KEYS_FOLDER,
    arguments,
    child,
    confined,
    environment,
    keys_secret_of,
    literal,
    model_volume,
    pod_template,
    scratch,
    shared_flags,
    size,
)
from kvferry.operator.objects.pool_tls import GATEWAY, tls_flags, tls_volume
from kvferry.operator.pool import names
from kvferry.operator.pool.spec import InferencePool, Json, StateSpec

_DRAIN_MARGIN_SECONDS = 15
_API_KEYS_FOLDER = "/etc/kvferry/api-keys"
_TENANTS_FOLDER = "/etc/kvferry/tenants"
_TLS_FOLDER = "/etc/kvferry/tls"
_ADMIN_FOLDER = "/etc/kvferry/admin"
_CLIENT_CA_FOLDER = "/etc/kvferry/client-ca"
_START_SECONDS = 600


def gateway_deployment(pool: InferencePool, default_image: str, account: str = "") -> Json:
    """Build the Deployment of the gateway pods.

    Args:
        pool: the pool.
        default_image: image for pools without `spec.image`.
        account: uid of the ServiceAccount if pods with tokens of an earlier account must be replaced.
    """
    marks = {names.LABEL_POOL: pool.name, names.LABEL_ROLE: names.ROLE_GATEWAY}
    labels = names.pool_labels(pool.name, names.ROLE_GATEWAY)
    template = pod_template(pool, labels, _pod(pool, default_image), pool.spec.gateway.template)
    if account:
        template["metadata"]["annotations"] = {
            **template["metadata"].get("annotations", {}),
            names.ANNOTATION_ACCOUNT: account,
        }
    return child(
        pool,
        "apps/v1",
        "Deployment",
        names.role_object(pool.name, names.ROLE_GATEWAY),
        names.ROLE_GATEWAY,
        spec={
            "replicas": pool.spec.gateway.replicas,
            "selector": {"matchLabels": marks},
            "revisionHistoryLimit": 2,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": template,
        },
    )


def _pod(pool: InferencePool, default_image: str) -> Json:
    volumes, mounts = scratch()
    model_volumes, model_mounts = model_volume(pool.spec.model.cache)
    volumes += model_volumes
    mounts += model_mounts
    if pool.spec.gateway.api_keys_secret:
        volumes.append({"name": "api-keys", "secret": {"secretName": pool.spec.gateway.api_keys_secret}})
        mounts.append({"name": "api-keys", "mountPath": _API_KEYS_FOLDER, "readOnly": True})
    if pool.spec.tenants.secret_name:
        volumes.append({"name": "tenants", "secret": {"secretName": pool.spec.tenants.secret_name}})
        mounts.append({"name": "tenants", "mountPath": _TENANTS_FOLDER, "readOnly": True})
    if pool.spec.gateway.tls_secret:
        volumes.append({"name": "tls", "secret": {"secretName": pool.spec.gateway.tls_secret}})
        mounts.append({"name": "tls", "mountPath": _TLS_FOLDER, "readOnly": True})
    if pool.spec.gateway.client_ca_secret:
        client_ca = {"secretName": pool.spec.gateway.client_ca_secret, "items": [{"key": "ca.crt", "path": "ca.crt"}]}
        volumes.append({"name": "client-ca", "secret": client_ca})
        mounts.append({"name": "client-ca", "mountPath": _CLIENT_CA_FOLDER, "readOnly": True})
    tls_volumes, tls_mounts = tls_volume(pool, GATEWAY)
    volumes += tls_volumes
    mounts += tls_mounts
    # Gateways get the block-name key, since they compute block names, and the key that signs their calls; with the
    # ticket key they could act as workers.
    items = [{"key": name, "path": name} for name in ("tenant-key", "gateway-key")]
    keys = {"secretName": keys_secret_of(pool), "items": items}
    volumes.append({"name": "keys", "secret": keys})
    mounts.append({"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True})
    # A volume of its own, since pods must start although the entry is missing.
    token = {"secretName": keys_secret_of(pool), "items": [{"key": ADMIN_ENTRY, "path": ADMIN_ENTRY}], "optional": True}
    volumes.append({"name": ADMIN_ENTRY, "secret": token})
    mounts.append({"name": ADMIN_ENTRY, "mountPath": _ADMIN_FOLDER, "readOnly": True})
    drain = pool.spec.drain
    return {
        "serviceAccountName": f"{pool.name}-gateway",
        "terminationGracePeriodSeconds": drain.linger_seconds + drain.seconds + _DRAIN_MARGIN_SECONDS,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {names.LABEL_POOL: pool.name, names.LABEL_ROLE: names.ROLE_GATEWAY}},
            }
        ],
        "containers": [
            confined(
                {
                    "name": names.GATEWAY_CONTAINER,
                    "image": pool.spec.image or default_image,
                    "imagePullPolicy": pool.spec.image_pull_policy,
                    "args": _arguments(pool),
                    "env": [*environment(pool), *_state_environment(pool.spec.gateway.state)],
                    "ports": [
                        {"name": "http", "containerPort": names.GATEWAY_HTTP},
                        {"name": "grpc", "containerPort": names.GATEWAY_GRPC},
                        *(
                            {"name": name, "containerPort": names.GATEWAY_ADMIN + i}
                            for i, name in enumerate(names.gateway_admin_ports(pool.spec.gateway.processes))
                        ),
                    ],
                    "resources": pool.spec.gateway.resources or {"requests": {"cpu": "100m", "memory": "256Mi"}},
                    "volumeMounts": mounts,
                    # If a container fails, the last lines of its log become the reason in the pool's status.
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    **_probes(pool),
                }
            )
        ],
        "volumes": volumes,
    }


def _state_environment(state: StateSpec) -> list[Json]:
    """Return the environment variable with the URL of the shared state, which may have a password."""
    if state.url_secret is not None:
        secret = {"name": state.url_secret.name, "key": state.url_secret.key}
        return [{"name": "KVFERRY_STATE", "valueFrom": {"secretKeyRef": secret}}]
    return [{"name": "KVFERRY_STATE", "value": literal(state.url)}] if state.url else []


def _arguments(pool: InferencePool) -> list[str]:
    spec = pool.spec
    flags: dict[str, object] = {
        "pool": f"{pool.namespace}/{pool.name}",
        "http": f"0.0.0.0:{names.GATEWAY_HTTP}",
        "grpc": f"0.0.0.0:{names.GATEWAY_GRPC}",
        "admin": f"0.0.0.0:{names.GATEWAY_ADMIN}",
        "admin-token-file": f"{_ADMIN_FOLDER}/{ADMIN_ENTRY}",
        "tenant-key-file": f"{KEYS_FOLDER}/tenant-key",
        "gateway-key-file": f"{KEYS_FOLDER}/gateway-key",
        "policy": spec.routing.policy,
        "prefix-blocks": spec.routing.prefix_blocks,
        "cache-map-blocks": spec.routing.cache_map_blocks,
        "skip-prefill-below": spec.routing.skip_prefill_below_tokens,
        "kv-prefetch-tokens": spec.routing.kv_prefetch_tokens,
        "max-streams": spec.flow_control.max_streams,
        "max-queued": spec.flow_control.max_queued,
        "max-queued-bytes": size(spec.flow_control.max_queued_bytes),
        "tenant-order": spec.flow_control.tenant_order,
        "max-held": spec.flow_control.max_held,
        "hold-seconds": spec.flow_control.hold_seconds,
        "request-timeout": spec.flow_control.request_timeout_seconds,
        "linger-seconds": spec.drain.linger_seconds,
        "drain-seconds": spec.drain.seconds,
        "processes": spec.gateway.processes,
        **shared_flags(pool),
    }
    if spec.gateway.api_keys_secret:
        flags["api-keys-file"] = f"{_API_KEYS_FOLDER}/keys"
    if spec.tenants.secret_name:
        flags["tenants"] = f"{_TENANTS_FOLDER}/tenants.toml"
    if spec.gateway.tls_secret:
        flags |= {"tls-cert-file": f"{_TLS_FOLDER}/tls.crt", "tls-key-file": f"{_TLS_FOLDER}/tls.key"}
    if spec.gateway.client_ca_secret:
        flags["tls-client-ca-file"] = f"{_CLIENT_CA_FOLDER}/ca.crt"
    if spec.gateway.state.url or spec.gateway.state.url_secret is not None:
        flags["state-bytes"] = size(spec.gateway.state.max_bytes)
    flags |= tls_flags(pool)
    return arguments("gateway", flags)


def can_scale_to_zero(pool: InferencePool) -> bool:
    """Return whether a role may be scaled to zero, so that the gateway must hold requests."""
    return any(role.scaling.mode != "Static" and role.scaling.min_replicas == 0 for role in pool.spec.roles)


def _probes(pool: InferencePool) -> Json:
    def get(path: str) -> Json:
        if pool.spec.gateway.client_ca_secret:  # the kubelet does not have the certificate that clients need
            return {"path": path, "port": "admin"}
        scheme = {"scheme": "HTTPS"} if pool.spec.gateway.tls_secret else {}
        return {"path": path, "port": "http", **scheme}

    return {
        "startupProbe": {
            "httpGet": get("/health"),
            "periodSeconds": 1,
            "failureThreshold": _START_SECONDS,
        },
        "readinessProbe": {
            "httpGet": get("/ready"),
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": 2,
        },
        "livenessProbe": {
            "httpGet": get("/health"),
            "periodSeconds": 10,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
        },
    }
