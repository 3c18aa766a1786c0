"""Converts the generated tokens of one sequence to its text and finds the stop string that ends it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvferry.core.inference.chunks import StopReason
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams


class TextDecoder(Protocol):
    """Converts the tokens of one stream to text incrementally; returns complete characters only."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that they complete."""
        ...

    def finish(self) -> str:
        """Return the remaining text after the last token."""
        ...


class StopFinder(Protocol):
    """Finds stop strings in text received in parts; holds back text that may be the start of a stop string."""

    @property
    def matched(self) -> str | None:
        """The stop string that was found; the output ends before it. `None` if none has been found yet."""
        ...

    def feed(self, text: str, *, may_match: bool = True) -> str:
        """Add text and return the part that is safe to send; empty after a match. Stop strings that end in text for
        which `may_match` is false are ignored."""
        ...

    def finish(self) -> str:
        """Return the text that is still held back. Called once, after the last call of `feed`."""
        ...


class Written(NamedTuple):
    """Text and tokens that a step adds to the output."""

    text: str
    tokens: tuple[SampledToken, ...]
    """The step's tokens, without those after a stop string."""
    finish_reason: FinishReason | None
    """Reason why the output has ended; `None` if it continues."""
    stop_reason: StopReason


class OutputText:
    """The text of one sequence while it is being generated."""

    def __init__(self, sampling: SamplingParams, detokenizer: TextDecoder, stops: StopFinder | None) -> None:
        """
        Args:
            sampling: the sequence's parameters.
            detokenizer: a new detokenizer.
            stops: a new matcher of the stop strings; `None` if there are none.
        """
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._stops = stops
        self._num_tokens = 0
        self._last: int | None = None
        """The last token."""

    @property
    def has_stop_strings(self) -> bool:
        """Whether the output may end with a stop string."""
        return self._stops is not None

    def add(
        self,
        tokens: tuple[SampledToken, ...],
        finish: FinishReason | None,
        may_stop: Callable[[str], bool] = lambda _: True,
    ) -> Written:
        """Add the tokens of a step.

        A stop string ends the output only if it ends after the text of the first `min_tokens` tokens.

        Args:
            tokens: the step's tokens.
            finish: reason why the engine ended the sequence; `None` if it did not.
            may_stop: returns whether a stop string may end in the text that a token adds.
        """
        shown: list[str] = []
        for position, token in enumerate(tokens, start=1):
            self._num_tokens += 1
            self._last = token.token_id
            shown.append(self._filter(self._detokenizer.feed((token.token_id,)), may_stop))
            if self._matched is not None:
                return Written("".join(shown), tokens[:position], FinishReason.STOP, self._matched)
        if finish is None:
            return Written("".join(shown), tokens, None, None)
        shown.append(self._filter(self._detokenizer.finish(), may_stop))
        if self._matched is not None:
            return Written("".join(shown), tokens, FinishReason.STOP, self._matched)
        if self._stops is not None:
            shown.append(self._stops.finish())
        return Written("".join(shown), tokens, finish, self._stop_token(finish))

    def _filter(self, text: str, may_stop: Callable[[str], bool]) -> str:
        if self._stops is None:
            return text
        clear = self._stops.feed(text, may_match=self._num_tokens > self._sampling.min_tokens and may_stop(text))
        if self._stops.matched is not None and self._sampling.include_stop_str_in_output:
            return clear + self._stops.matched
        return clear

    @property
    def _matched(self) -> str | None:
        return None if self._stops is None else self._stops.matched

    def _stop_token(self, finish: FinishReason) -> int | None:
        """Return the stop token id that ended the sequence; `None` for an end-of-sequence token of the model."""
        if finish is not FinishReason.STOP:
            return None
        return self._last if self._last in self._sampling.stop_token_ids else None
