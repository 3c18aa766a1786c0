"""Response bodies of the routes for ended requests, health, readiness and the version."""

from typing import Literal

from msgspec import Struct

from kvferry.core.causes import ComputedTokens
from kvferry.core.ids import RequestId
from kvferry.core.inference.chunks import Timing
from kvferry.gateway.decide.routing.route_notes import RouteNote
from kvferry.gateway.observe.dashboard.phases import Phase


class EndedSample(Struct):
    """An ended sample of a request, as stored in the journal."""

    sample_index: int
    outcome: Literal["done", "failed", "cancelled"]
    error: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    beam_width: int
    routes: list[RouteNote]
    timing: Timing
    computed: list[ComputedTokens]
    phases: list[Phase]


class EndedRequest(Struct):
    """Response of GET /v1/requests/{request_id}."""

    request_id: RequestId
    samples: list[EndedSample]


class Alive(Struct):
    """Response of GET /health."""

    status: Literal["alive"] = "alive"


class Version(Struct):
    """Response of GET /version."""

    version: str


class Ready(Struct):
    """Response of GET /ready."""

    ready: bool
    notes: list[str]
    """Workers that accept no requests, and other reasons."""
