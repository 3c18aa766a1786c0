"""Applies what is around a pool's pods: each object only where it changed, what is not wanted removed once."""

import base64
import secrets

from kvferry.core.errors import Unavailable
from kvferry.operator import names
from kvferry.operator.api import ApiRefusal
from kvferry.operator.gateway_pods import gateway_deployment
from kvferry.operator.pods import child
from kvferry.operator.pool_pass import PoolPass
from kvferry.operator.spec import Json
from kvferry.operator.status import Problem
from kvferry.operator.surroundings import EXTENSION_POOL, POD_MONITOR, surroundings

_KEYS = ("ticket-key", "tenant-key")
_FIRST_MINUTE = 60.0
_KEYS_SOON, _KEYS_LATER = 5.0, 590.0
"""Until it is seen again whether they are there."""


def apply_surroundings(this: PoolPass) -> None:
    """Everything but Deployments and scalers."""
    _keys(this)
    children = this.memory.children
    for installable, kind in ((POD_MONITOR, "PodMonitor"), (EXTENSION_POOL, "InferencePool")):
        if installable not in this.installed:
            children.forget_kind(kind)
    for made in surroundings(this.pool, this.installed):
        name = made["metadata"]["name"]
        if made["kind"] == "InferencePool":
            _emit(this, made)
            continue
        live: str | None = None
        if made["kind"] == "Service":
            found = this.facts.services.get(name)
            live = "" if found is None else found.version
        with this.noting(f"{made['kind']} {name}"):
            children.apply(made, live)
    _remove_unwanted(this)


def apply_gateway(this: PoolPass) -> tuple[int, str]:
    """The gateway's Deployment; how many of its pods are ready, and what its own rollout still needs."""
    made = gateway_deployment(this.pool, this.default_image)
    found = this.facts.deployments.get(made["metadata"]["name"])
    with this.noting(f"Deployment {made['metadata']['name']}"):
        this.memory.children.apply(made, "" if found is None else str(found.generation))
    if found is None:
        return 0, "gateway: not made yet"
    wanted = this.pool.spec.gateway.replicas
    if found.settled and found.desired == found.updated == found.pods == found.ready == wanted:
        return found.ready, ""
    good = min(found.updated, found.ready, wanted)
    if good == wanted:
        return found.ready, f"gateway: {max(0, found.pods - wanted)} old pods left"
    return found.ready, f"gateway: {good} of {wanted} pods updated and ready"


def _keys(this: PoolPass) -> None:
    """Draw the pool's keys where it has none; they are never read, nor written over.

    That there is a Secret of the name does not say whose: in a pool's first minute it may be an earlier pool's, on its
    way out.
    """
    pool, memory = this.pool, this.memory
    if pool.spec.tenancy.keys_secret or this.now < memory.keys_until:
        return
    drawn = {name: base64.b64encode(secrets.token_hex(32).encode()).decode() for name in _KEYS}
    with this.noting(f"Secret {names.keys_secret(pool.name)}"):
        made = this.api.create(child(pool, "v1", "Secret", names.keys_secret(pool.name), type="Opaque", data=drawn))
        young = made is None and this.now - memory.born_at < _FIRST_MINUTE
        memory.keys_until = this.now + (_KEYS_SOON if young else _KEYS_LATER)


def _emit(this: PoolPass, made: Json) -> None:
    name = made["metadata"]["name"]
    try:
        this.memory.children.apply(made)
    except Unavailable:
        raise
    except ApiRefusal as refusal:
        this.extension = Problem("Refused", f"InferencePool {name}: {refusal.message}")
    else:
        this.extension = Problem(
            "Emitted",
            f"{made['apiVersion']} InferencePool {name} stands for the gateway pods. Any of them takes any request, so "
            "there is no endpoint picker: its failureMode is FailOpen",
        )


def _remove_unwanted(this: PoolPass) -> None:
    pool, children = this.pool, this.memory.children
    place = pool.namespace
    if pool.spec.network_policy == "Off":
        children.remove("networking.k8s.io/v1", "NetworkPolicy", place, f"{pool.name}-workers", pool.uid)
    if pool.spec.observability.pod_monitor == "Off" and POD_MONITOR in this.installed:
        children.remove(POD_MONITOR[0], "PodMonitor", place, pool.name, pool.uid)
    if pool.spec.gateway.inference_extension == "Off":
        if EXTENSION_POOL in this.installed:
            children.remove(EXTENSION_POOL[0], "InferencePool", place, pool.name, pool.uid)
    elif EXTENSION_POOL not in this.installed:
        this.extension = Problem(
            "KindNotInstalled",
            f"the cluster has no InferencePool of {EXTENSION_POOL[0]}; install the Gateway API Inference Extension, "
            "or set spec.gateway.inferenceExtension to Off",
        )
