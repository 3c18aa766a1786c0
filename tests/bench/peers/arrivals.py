"""Requests with arrival times, for adapters: those that are due, and the times of their tokens.

Runs in an engine's own interpreter, with the standard library only.
"""

import time
from collections import deque


class Arrivals:
    """One trial. Times are seconds since it began."""

    def __init__(self, requests):
        self._requests = requests
        self._coming = deque(sorted(range(len(requests)), key=lambda number: requests[number]["at"]))
        self._first = {}
        self._last = {}
        self._drawn = {}
        self._begun = time.monotonic()

    @property
    def are_all_here(self):
        return not self._coming

    def due(self):
        """Return the requests, with their numbers, that have arrived since the last call."""
        now, found = self._now(), []
        while self._coming and self._requests[self._coming[0]]["at"] <= now:
            number = self._coming.popleft()
            found.append((number, self._requests[number]))
        return found

    def rest(self):
        """Return the time until the next arrival in seconds, for an idle engine."""
        time.sleep(max(0.0, self._requests[self._coming[0]]["at"] - self._now()))

    def drew(self, number, tokens=1):
        """Record that a request got more tokens."""
        if tokens <= 0:
            return
        now = self._now()
        self._first.setdefault(number, now)
        self._last[number] = now
        self._drawn[number] = self._drawn.get(number, 0) + tokens

    def drawn(self, number):
        """Return the number of tokens of a request."""
        return self._drawn.get(number, 0)

    def outcome(self, input_tokens=None):
        """Return the outcome. `input_tokens`: number that the engine counted, if it does."""
        asked = sum(len(request["tokens"]) for request in self._requests)
        return {
            "seconds": self._now(),
            "first_seconds": min(self._first.values()),
            "input_tokens": asked if input_tokens is None else input_tokens,
            "output_tokens": sum(self._drawn.values()),
            "ttft": [at - self._requests[number]["at"] for number, at in self._first.items()],
            "tpot": [
                (self._last[number] - self._first[number]) / (count - 1)
                for number, count in self._drawn.items()
                if count > 1
            ],
        }

    def _now(self):
        return time.monotonic() - self._begun
