"""Slows the guessing of API keys: counts the wrong keys of each address. Pure: the time is an argument."""

from collections import OrderedDict, deque

MAX_WRONG_KEYS = 10
"""Number of wrong keys from one address within `WINDOW_SECONDS` after which its further keys are not looked up."""
WINDOW_SECONDS = 60.0
_MAX_ADDRESSES = 4096
_MAX_USED = 4096


class KeyGuesses:
    """Wrong keys by address, and the keys that each address has used successfully, which are always looked up, so that
    clients behind one proxy cannot lock each other out. Both tables are bounded; the oldest entries are dropped
    first."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()
        self._used: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def wait_seconds(self, address: str, digest: bytes, now: float) -> float:
        """Return the time until keys from `address` are looked up again, in seconds; 0 if they are looked up now.

        Args:
            address: host of the client.
            digest: digest of the key.
            now: monotonic time in seconds.
        """
        times = self._wrong.get(address)
        if times is None or (address, digest) in self._used:
            return 0.0
        while times and times[0] + WINDOW_SECONDS <= now:
            times.popleft()
        return times[0] + WINDOW_SECONDS - now if len(times) >= MAX_WRONG_KEYS else 0.0

    def note_right(self, address: str, digest: bytes) -> None:
        """Record that `address` has used a known key.

        Args:
            address: host of the client.
            digest: digest of the key.
        """
        self._used[address, digest] = None
        self._used.move_to_end((address, digest))
        if len(self._used) > _MAX_USED:
            self._used.popitem(last=False)

    def note_wrong(self, address: str, now: float) -> None:
        """Record that `address` has used an unknown key at `now`, monotonic seconds."""
        self._wrong.setdefault(address, deque(maxlen=MAX_WRONG_KEYS)).append(now)
        self._wrong.move_to_end(address)
        if len(self._wrong) > _MAX_ADDRESSES:
            self._wrong.popitem(last=False)
