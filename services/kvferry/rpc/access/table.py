"""The internal methods that each role may call. Pure.

Health and reflection are open, for probes and tools. Methods that are not in the table may not be called.
"""

from collections.abc import Mapping
from enum import StrEnum


class CallerRole(StrEnum):
    """Role of a process that calls another one."""

    GATEWAY = "gateway"
    WORKER = "worker"
    OPERATOR = "operator"
    """An administrator or a program that drains workers."""


_GATEWAY = frozenset({CallerRole.GATEWAY})
_WORKER = frozenset({CallerRole.WORKER})
_OPERATOR = frozenset({CallerRole.OPERATOR})

ALLOWED: Mapping[str, frozenset[CallerRole]] = {
    "/kvferry.v1.Prefill/Run": _GATEWAY,
    "/kvferry.v1.Prefill/Release": _GATEWAY,
    "/kvferry.v1.Prefill/Pool": _GATEWAY,
    "/kvferry.v1.Decode/Run": _GATEWAY,
    "/kvferry.v1.Decode/PrefetchKv": _GATEWAY,
    "/kvferry.v1.Inference/Generate": _GATEWAY,
    "/kvferry.v1.Inference/Tokenize": _GATEWAY,
    "/kvferry.v1.Inference/Detokenize": _GATEWAY,
    "/kvferry.v1.Inference/GetModelInfo": _GATEWAY,
    "/kvferry.v1.Inference/Embed": _GATEWAY,
    "/kvferry.v1.KvTransfer/Describe": _WORKER,
    "/kvferry.v1.KvTransfer/Claim": _WORKER,
    "/kvferry.v1.KvTransfer/Renew": _WORKER,
    "/kvferry.v1.KvTransfer/Finish": _WORKER,
    "/kvferry.v1.KvTransfer/WatchBlocks": _WORKER,
    "/kvferry.v1.KvEvents/Subscribe": _GATEWAY | _OPERATOR,
    "/kvferry.v1.KvEvents/Probe": _GATEWAY | _OPERATOR,
    "/kvferry.v1.WorkerAdmin/Status": _GATEWAY | _OPERATOR,
    "/kvferry.v1.WorkerAdmin/Drain": _OPERATOR,
    "/kvferry.v1.WorkerAdmin/ResetPrefixCache": _GATEWAY | _OPERATOR,
    "/kvferry.v1.WorkerAdmin/PinPrefix": _GATEWAY | _OPERATOR,
    "/kvferry.v1.WorkerAdmin/UnpinPrefix": _GATEWAY | _OPERATOR,
    "/kvferry.v1.WorkerAdmin/LoadAdapter": _GATEWAY | _OPERATOR,
    "/kvferry.v1.WorkerAdmin/UnloadAdapter": _GATEWAY | _OPERATOR,
    "/kvferry.v1.WorkerAdmin/SetPause": _GATEWAY | _OPERATOR,
    "/kvferry.v1.WorkerAdmin/PrepareWeights": _GATEWAY | _OPERATOR,
    "/kvferry.v1.WorkerAdmin/CommitWeights": _GATEWAY | _OPERATOR,
    "/kvferry.v1.WorkerAdmin/DiscardWeights": _GATEWAY | _OPERATOR,
    "/kvferry.v1.WorkerAdmin/Profile": _OPERATOR,
}
"""Roles that may call each method of a worker, by full method name."""


def may_call(role: CallerRole, method: str) -> bool:
    """Return whether a process of `role` may call `method`, for example `/kvferry.v1.Prefill/Run`."""
    return role in ALLOWED.get(method, frozenset())
