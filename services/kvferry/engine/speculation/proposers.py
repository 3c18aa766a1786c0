"""Proposers of draft tokens: continuations of earlier occurrences of what a sequence ends with.

Both proposers look only at the sequence's own tokens. A continuation that reaches the end of the text is continued
periodically: the text after the match is the draft itself.
"""

from collections import Counter
from typing import NamedTuple, Protocol

from kvferry.engine.speculation.matches import Matches, Tokens, longest_matches

MAX_MATCH = 32
"""Match lengths above this one are not distinguished."""
_VOTERS = 32
"""Occurrences that vote on a continuation: the latest ones."""
_MIN_SHARE = 0.34
"""A draft ends where the most frequent continuations have a smaller product of shares."""


class Draft(NamedTuple):
    """Proposed continuation of a sequence."""

    tokens: tuple[int, ...]
    match: int
    """Length of the matched suffix in tokens; 0 if the draft is empty."""


NO_DRAFT = Draft((), 0)


class Proposer(Protocol):
    """Proposes the next tokens of a sequence."""

    def propose(self, tokens: Tokens, most: int) -> Draft:
        """Propose at most `most` tokens that follow `tokens`, [N] int32."""
        ...


class NgramProposer:
    """Prompt lookup: the tokens after the first earlier occurrence of the longest suffix (Saxena, Prompt Lookup
    Decoding, 2023)."""

    def __init__(self, *, least: int, most: int) -> None:
        """
        Args:
            least: minimum length of the suffix.
            most: maximum length that is compared.
        """
        self._least, self._most = least, most

    def propose(self, tokens: Tokens, most: int) -> Draft:
        """See `Proposer.propose`."""
        found = longest_matches(tokens, least=self._least, most=self._most)
        return NO_DRAFT if found is None else Draft(_continued(found, int(found.ends[0]), most), found.length)


class SuffixProposer:
    """Suffix decoding: at each position the most frequent token after the earlier occurrences that agree with the
    draft so far, the latest one on a tie; the draft is no longer than the match that supports it (Oliaro et al.,
    SuffixDecoding, 2024, section 4, with the sequence's own tokens as the tree)."""

    def __init__(self, *, least: int = 2, factor: float = 2.0) -> None:
        """
        Args:
            least: minimum length of the suffix.
            factor: maximum number of draft tokens per token of the match.
        """
        self._least, self._factor = least, factor

    def propose(self, tokens: Tokens, most: int) -> Draft:
        """See `Proposer.propose`."""
        found = longest_matches(tokens, least=self._least, most=MAX_MATCH)
        if found is None:
            return NO_DRAFT
        most = min(most, max(1, int(self._factor * found.length)))
        return Draft(_voted(found, most), found.length)


def _voted(found: Matches, most: int) -> tuple[int, ...]:
    ends = found.ends[-_VOTERS:].tolist()
    draft: list[int] = []
    share, last = 1.0, len(found.tokens) - 1
    while len(ends) > 1 and len(draft) < most:
        following = [(end, int(found.tokens[end + 1 + len(draft)])) for end in ends if end + 1 + len(draft) <= last]
        if not following:
            break
        counts = Counter(token for _, token in following)
        best = max(counts.values())
        token = next(token for _, token in reversed(following) if counts[token] == best)
        share *= best / len(following)
        if share < _MIN_SHARE:
            return tuple(draft)
        draft.append(token)
        ends = [end for end, other in following if other == token]
    if len(draft) < most:
        draft += _continued(found, ends[-1], most)[len(draft) :]
    return tuple(draft)


def _continued(found: Matches, end: int, most: int) -> tuple[int, ...]:
    """Return the `most` tokens after position `end`; beyond the text they repeat with the period of the match."""
    known = tuple(found.tokens[end + 1 : end + 1 + most].tolist())
    if len(known) == most:
        return known
    return tuple(known[i % len(known)] for i in range(most))
