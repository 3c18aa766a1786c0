"""The room of the fleet for further requests, computed once for each change of the fleet."""

from kvferry.gateway.decide.flow.capacity import CLOSED, UNBOUNDED, Room, room, step_places
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.fleet.readiness import can_serve


class FleetRoom:
    """Bounds on a gateway's dispatched requests. Used on the event loop's thread only."""

    def __init__(self, fleet: Fleet, max_streams: int, *, is_held_when_empty: bool) -> None:
        """
        Args:
            fleet: the workers, whose loads bound the requests.
            max_streams: maximum number of samples in flight.
            is_held_when_empty: whether requests are held while there are no workers; otherwise they are dispatched, and
                fail.
        """
        self._fleet = fleet
        self._max_streams = max_streams
        self._is_held_when_empty = is_held_when_empty
        self._room = Room()
        self._step_places = UNBOUNDED
        self._seen = -1
        self._accepting: tuple[str, ...] | None = None
        self.is_asleep = False
        """Whether requests are held because no worker can serve them, at the last call of `now`."""

    def now(self) -> Room:
        """Return the present bounds."""
        if self._fleet.num_changes != self._seen:
            self._seen = self._fleet.num_changes
            self._update()
        return self._room

    def step_places(self) -> int:
        """Return how many steps of beam searches may run on the workers at a time; see `capacity.step_places`."""
        self.now()
        return self._step_places

    def _update(self) -> None:
        found = self._fleet.rooms()
        accepting = tuple(found)
        if self._is_held_when_empty and accepting != self._accepting:
            self.is_asleep = not can_serve(self._fleet)
        self._accepting = accepting
        self._step_places = step_places(found.values())
        self._room = CLOSED if self.is_asleep else room(found.values(), self._max_streams)
