"""BPE of SentencePiece (Kudo and Richardson, SentencePiece, 2018): spaces are the character U+2581, and characters
without a token are spelled with a token per byte.

A SentencePiece model has scores instead of merges: of all adjacent pieces whose concatenation is a token, those with
the highest score are merged first. Listing the pairs of all tokens by score gives merges with the same effect.
"""

from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

SPACE = "\u2581"
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""Types of tokens in `tokenizer.ggml.token_type`."""


def merges_of(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a token, by the score of the concatenation, best first. Takes
    two seconds for 256,000 tokens.

    Args:
        tokens: tokens by id.
        scores: score of each token.
        types: type of each token; unknown, control and byte tokens are not merged.
    """
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] not in (UNKNOWN, CONTROL, BYTE)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocabulary.items():
        for cut in range(1, len(token)):
            left = vocabulary.get(token[:cut])
            if left is not None and (right := vocabulary.get(token[cut:])) is not None:
                found.append((-scores[token_id], left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def sentencepiece(
    tokens: Sequence[str], merges: list[tuple[str, str]], types: Sequence[int], *, adds_space: bool
) -> tokenizers.Tokenizer:
    """Create the library's tokenizer.

    Args:
        tokens: tokens by id.
        merges: result of `merges_of`.
        types: type of each token.
        adds_space: whether a space is added to the start of text.
    """
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == UNKNOWN), None)
    fast = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if adds_space else []
    fast.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", SPACE)])
    text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)] if adds_space else text)
    marked = [(token, types[i]) for token, i in vocabulary.items()]
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in marked if k == CONTROL])
    # A token with U+2581 must be found in normalized text. With an added space, the library would add it to the token.
    fast.add_tokens(
        [
            AddedToken(t, special=False, normalized=SPACE in t)
            for t, k in marked
            if k == USER_DEFINED and not (adds_space and SPACE in t)
        ]
    )
    return fast
