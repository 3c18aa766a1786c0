"""Fields with which clients ask the cache to keep a prompt, or to keep a conversation on one worker.

| field | API | effect |
| --- | --- | --- |
| `prompt_cache_key`, `session_id` | OpenAI, vLLM | affinity |
| `prompt_cache_options`, `prompt_cache_retention`, `prompt_cache_breakpoint` | OpenAI | retention |
| `cache_control` | Anthropic | retention |
| `kv_hints` | vLLM, SGLang | the actions `retain` and `session` of version 1 |

The whole prompt is retained, wherever a mark stands: a longer prompt has the same beginning. The longest of several
times counts. The answer's `kvferry.retention` has what was granted.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from kvferry.core.errors import InvalidRequest
from kvferry.core.limits import MAX_AFFINITY_KEY_CHARS
from kvferry.core.retention import MAX_RETENTION_SECONDS, CacheHints
from kvferry.gateway.http.fields.strict import Strict, shown

_TTL = r"^[1-9][0-9]{0,5}[smh]$"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DEFAULT_CONTROL = "5m"
"""Time of a `cache_control` without `ttl` (Anthropic, "Prompt caching")."""
_DEFAULT_OPTIONS = "30m"
"""Time of `prompt_cache_options` without `ttl` (OpenAI, API reference of chat completions)."""
_MAX_ACTION_CHARS = 64
_MAX_ACTIONS = 32
"""Actions of a request, whose names may all be in the header of ignored fields."""
Ttl = Annotated[str, Field(pattern=_TTL)]
"""A time such as `300s`, `30m` or `1h`."""
AffinityKey = Annotated[str, Field(max_length=MAX_AFFINITY_KEY_CHARS)]


class CacheControl(Strict):
    """A mark at the end of a part of the prompt that is to be kept."""

    type: Literal["ephemeral"]
    ttl: Ttl | None = None


class CacheBreakpoint(Strict):
    """A mark at the end of a part of the prompt that is to be kept."""

    mode: Literal["explicit"]
    ttl: Ttl | None = None


class PromptCacheOptions(Strict):
    """Whether the prompt is kept without marks, and for how long."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Ttl | None = None


class HintAction(Strict):
    """One action of `kv_hints`."""

    action_id: Annotated[str, Field(max_length=_MAX_ACTION_CHARS)]
    action_type: Annotated[str, Field(max_length=_MAX_ACTION_CHARS)]
    action_version: Annotated[str, Field(max_length=_MAX_ACTION_CHARS)]
    payload: dict[str, Any] = Field(default_factory=dict)


class KvHints(Strict):
    """Versioned hints of an orchestrator; see vLLM's pull request 53423. Other actions have no effect."""

    protocol_version: str
    message_id: str
    actions: Annotated[list[HintAction], Field(max_length=_MAX_ACTIONS, fail_fast=True)] = Field(default_factory=list)


class CacheHintFields(Strict):
    """The fields of a request body."""

    prompt_cache_key: AffinityKey | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """Older form of `prompt_cache_options.ttl`."""
    session_id: AffinityKey | None = None
    kv_hints: KvHints | None = None

    def cache_hints(self, marks: Iterable[CacheControl | CacheBreakpoint | None] = ()) -> CacheHints:
        """Return what the request asks of the cache.

        Args:
            marks: the marks in the body's messages and tools.

        Raises:
            InvalidRequest: the payload of an action is not valid.
        """
        options = self.prompt_cache_options
        inherited = _DEFAULT_OPTIONS if options is None or options.ttl is None else options.ttl
        times = [
            _seconds(mark.ttl or (_DEFAULT_CONTROL if isinstance(mark, CacheControl) else inherited))
            for mark in marks
            if mark is not None
        ]
        if options is not None and options.mode != "explicit":
            times.append(_seconds(inherited))
        if self.prompt_cache_retention == "24h":
            times.append(_seconds("24h"))
        keys = [self.prompt_cache_key, self.session_id]
        for number, action in enumerate(self._actions):
            payload, where = action.payload, f"kv_hints.actions.{number}.payload"
            if action.action_type == "retain":
                times.append(_ttl_seconds(payload.get("ttl_seconds"), f"{where}.ttl_seconds"))
            else:
                keys.append(_session(payload.get("session_id"), f"{where}.session_id"))
        return CacheHints(min(max(times, default=0.0), MAX_RETENTION_SECONDS), next((key for key in keys if key), ""))

    def actions_without_effect(self) -> tuple[str, ...]:
        """Return the names of the actions of `kv_hints` that are not implemented, each once."""
        actions = [] if self.kv_hints is None else self.kv_hints.actions
        return tuple(dict.fromkeys(f"kv_hints.{one.action_type}" for one in actions if not _is_known(one)))

    @property
    def _actions(self) -> list[HintAction]:
        return [] if self.kv_hints is None else [one for one in self.kv_hints.actions if _is_known(one)]


def _is_known(action: HintAction) -> bool:
    return action.action_type in ("retain", "session") and action.action_version.partition(".")[0] == "1"


def _seconds(ttl: str) -> float:
    return float(ttl[:-1]) * _UNITS[ttl[-1]]


def _ttl_seconds(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InvalidRequest(f"{where} must be a time in seconds above 0, not {shown(value)}", field=where)
    return float(value)


def _session(value: object, where: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_AFFINITY_KEY_CHARS:
        raise InvalidRequest(f"{where} must be a text of 1 to {MAX_AFFINITY_KEY_CHARS} characters", field=where)
    return value
