"""Proposers of draft tokens: continuations of earlier occurrences of a sequence's last tokens.

Both proposers look only at the sequence's own tokens. A continuation that reaches the end of the text is repeated
periodically: the text after the match is then the draft itself.
"""

from collections import Counter
from typing import NamedTuple, Protocol

from kvferry.engine.schedule.speculation.matches import Matches, Tokens, longest_matches

MAX_MATCH = 32
"""Maximum match length; longer matches are not distinguished."""
_VOTERS = 32
"""Number of occurrences, the latest ones, that vote on a continuation."""
_MIN_SHARE = 0.34
"""A draft ends when the product of the shares of the most frequent continuations falls below this value."""


class Draft(NamedTuple):
    """Proposed continuation of a sequence."""

    tokens: tuple[int, ...]
    match: int
    """Length of the matched suffix in tokens; 0 if the draft is empty."""


NO_DRAFT = Draft((), 0)


class Proposer(Protocol):
    """Proposes the next tokens of a sequence."""

    def propose(self, tokens: Tokens, limit: int) -> Draft:
        """Propose at most `limit` tokens that follow `tokens`, [N] int32.

        Args:
            tokens: prompt and output so far, [N] int32.
            limit: maximum number of draft tokens.
        """
        ...


class NgramProposer:
    """Prompt lookup: the tokens after the first earlier occurrence of the longest suffix (Saxena, Prompt Lookup
    Decoding, 2023)."""

    def __init__(self, *, min_length: int, max_length: int) -> None:
        """
        Args:
            min_length: minimum length of the suffix.
            max_length: maximum length that is compared.
        """
        self._min_length, self._max_length = min_length, max_length

    def propose(self, tokens: Tokens, limit: int) -> Draft:
        """See `Proposer.propose`."""
        found = longest_matches(tokens, min_length=self._min_length, max_length=self._max_length)
        return NO_DRAFT if found is None else Draft(_continued(found, int(found.ends[0]), limit), found.length)


class SuffixProposer:
    """Suffix decoding: at each position the most frequent token after the earlier occurrences that agree with the
    draft so far, the latest one on a tie; the draft is no longer than the match that supports it (Oliaro et al.,
    SuffixDecoding, 2024, section 4, with the sequence's own tokens as the tree)."""

    def __init__(self, *, min_length: int = 2, factor: float = 2.0) -> None:
        """
        Args:
            min_length: minimum length of the suffix.
            factor: maximum number of draft tokens per token of the match.
        """
        self._min_length, self._factor = min_length, factor

    def propose(self, tokens: Tokens, limit: int) -> Draft:
        """See `Proposer.propose`."""
        found = longest_matches(tokens, min_length=self._min_length, max_length=MAX_MATCH)
        if found is None:
            return NO_DRAFT
        limit = min(limit, max(1, int(self._factor * found.length)))
        return Draft(_voted(found, limit), found.length)


def _voted(found: Matches, limit: int) -> tuple[int, ...]:
    ends = found.ends[-_VOTERS:].tolist()
    draft: list[int] = []
    share, last = 1.0, len(found.tokens) - 1
    while len(ends) > 1 and len(draft) < limit:
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
    if len(draft) < limit:
        draft += _continued(found, ends[-1], limit)[len(draft) :]
    return tuple(draft)


def _continued(found: Matches, end: int, limit: int) -> tuple[int, ...]:
    """Return the `limit` tokens after position `end`; past the end of the text, repeat the matched period."""
    known = tuple(found.tokens[end + 1 : end + 1 + limit].tolist())
    if len(known) == limit:
        return known
    return tuple(known[i % len(known)] for i in range(limit))
