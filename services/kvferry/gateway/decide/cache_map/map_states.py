"""The states of a replica's map: whether it equals the replica's cache.

Only an exact map is used for predictions; for the other states the gateway uses its own routing history.
"""

from enum import StrEnum

from kvferry.core.states import Machine


class MapState(StrEnum):
    """State of a replica's map; transitions are in `MAP_MACHINE`."""

    BLIND = "blind"
    """The cache is unknown: no subscription, or an event was lost or inconsistent. The map is empty."""
    CATCHING_UP = "catching_up"
    """A snapshot or a large change is only partially applied."""
    EXACT = "exact"
    """The map equals the replica's cache as of the last event; the digest of the event was verified."""
    GONE = "gone"
    """The replica was removed from the fleet."""


class MapEvent(StrEnum):
    """Event that changes the state of a replica's map; transitions are in `MAP_MACHINE`."""

    SUBSCRIBED = "subscribed"
    PART = "part"
    """A part of a snapshot, or of a change that is applied in several slices."""
    APPLIED = "applied"
    """A whole snapshot or change was applied, and its digest matches."""
    MISMATCH = "mismatch"
    """The digest of an event differs from the map's."""
    GAP = "gap"
    """An event does not follow its predecessor: lost, repeated or reordered events."""
    OTHER_INCARNATION = "other_incarnation"
    """The worker restarted."""
    MALFORMED = "malformed"
    """An event has names of the wrong length, removes unknown blocks, or contradicts its own digest."""
    OTHER_NAMES = "other_names"
    """The worker's block names differ from the gateway's, because their tenant keys differ."""
    FULL = "full"
    """The limit on blocks was reached, and this replica has the most blocks."""
    AUDIT_FAILED = "audit_failed"
    """The worker's answer to an audit contradicts the map."""
    FEED_LOST = "feed_lost"
    """The event stream ended."""
    LEFT = "left"
    """The replica was removed from the fleet."""


LOSSES = (
    MapEvent.MISMATCH,
    MapEvent.GAP,
    MapEvent.OTHER_INCARNATION,
    MapEvent.MALFORMED,
    MapEvent.OTHER_NAMES,
    MapEvent.FULL,
    MapEvent.AUDIT_FAILED,
    MapEvent.FEED_LOST,
)
"""Events after which the map is empty and its replica has to be subscribed to again."""

MAP_MACHINE: Machine[MapState, MapEvent] = Machine(
    name="cache-map",
    initial=MapState.BLIND,
    final=frozenset({MapState.GONE}),
    table={
        (MapState.BLIND, MapEvent.SUBSCRIBED): MapState.CATCHING_UP,
        (MapState.CATCHING_UP, MapEvent.PART): MapState.CATCHING_UP,
        (MapState.CATCHING_UP, MapEvent.APPLIED): MapState.EXACT,
        (MapState.EXACT, MapEvent.PART): MapState.CATCHING_UP,
        (MapState.EXACT, MapEvent.APPLIED): MapState.EXACT,
        **{(state, loss): MapState.BLIND for state in (MapState.CATCHING_UP, MapState.EXACT) for loss in LOSSES},
        **{(state, MapEvent.LEFT): MapState.GONE for state in MapState if state is not MapState.GONE},
    },
)
