"""What `roles[].template` and `gateway.template` of a pool may contain, by the operator's setting `template`. Pure.

A template is merged over the operator's pods, so whoever creates pools can otherwise run any container with any volume,
service account and privilege of the namespace. `Restricted` leaves what places pods and sizes them.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from kvferry.core.errors import UsageError
from kvferry.operator.pool import names
from kvferry.operator.pool.spec import InferencePool


class TemplatePolicy(StrEnum):
    """Values of the setting."""

    ANY = "Any"
    RESTRICTED = "Restricted"


_ANYTHING: Mapping[str, Any] = {}
"""Permits all below a field."""
_CONTAINER: Mapping[str, Any] = {
    "name": _ANYTHING,
    "resources": _ANYTHING,
    "env": {"name": _ANYTHING, "value": _ANYTHING},
}
_PERMITTED: Mapping[str, Any] = {
    "metadata": {"labels": _ANYTHING, "annotations": _ANYTHING},
    "spec": {
        "affinity": _ANYTHING,
        "nodeSelector": _ANYTHING,
        "tolerations": _ANYTHING,
        "topologySpreadConstraints": _ANYTHING,
        "priorityClassName": _ANYTHING,
        "runtimeClassName": _ANYTHING,
        "schedulerName": _ANYTHING,
        "schedulingGates": _ANYTHING,
        "terminationGracePeriodSeconds": _ANYTHING,
        "containers": _CONTAINER,
    },
}
"""The fields that `Restricted` permits. In lists, the fields of each entry."""
_PERMITTED_TEXT = (
    "labels, annotations, affinity, nodeSelector, tolerations, topologySpreadConstraints, priorityClassName, "
    "runtimeClassName, schedulerName, schedulingGates, terminationGracePeriodSeconds, and resources and env values of "
    "the pod's own containers"
)


def check_templates(pool: InferencePool, policy: TemplatePolicy) -> None:
    """Check the templates of a pool.

    Args:
        pool: the pool.
        policy: the operator's setting.

    Raises:
        UsageError: a template has a field that the policy does not permit; the message names it.
    """
    if policy is TemplatePolicy.ANY:
        return
    templates = {f"roles[{role.name}].template": (names.WORKER_CONTAINER, role.template) for role in pool.spec.roles}
    templates["gateway.template"] = (names.GATEWAY_CONTAINER, pool.spec.gateway.template)
    for where, (container, template) in templates.items():
        for path in _refused(template, _PERMITTED, where):
            raise UsageError(
                f"{path} is not permitted: this operator runs with --template {policy}, which permits "
                f"{_PERMITTED_TEXT}; leave it out, or ask the administrator of the cluster",
                field=path,
            )
        spec = template.get("spec")
        entries = spec.get("containers") if isinstance(spec, Mapping) else None
        for entry in entries if isinstance(entries, list) else ():
            name = entry.get("name") if isinstance(entry, Mapping) else None
            if name != container:
                raise UsageError(
                    f"{where}.spec.containers may change the container {container!r} only, not {name!r}: this operator "
                    f"runs with --template {policy}",
                    field=f"{where}.spec.containers",
                )


def _refused(value: object, permitted: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield the paths of fields that are not permitted."""
    if not permitted:
        return
    if isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _refused(entry, permitted, f"{where}[{number}]")
        return
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        if name not in permitted:
            yield f"{where}.{name}"
        else:
            yield from _refused(inner, permitted[name], f"{where}.{name}")
