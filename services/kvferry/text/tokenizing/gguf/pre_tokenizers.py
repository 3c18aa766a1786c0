"""Rules by which byte-level tokenizers split text before merging, by their names in `tokenizer.ggml.pre`.

The rules follow llama.cpp (src/llama-vocab.cpp), in the form of the models' tokenizer.json files. Unknown names are
rejected, since a wrong rule silently degrades the model's output.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import Regex, pre_tokenizers


def _characters(ranges: str) -> str:
    """Return characters for a class of a regular expression.

    Args:
        ranges: code points in hexadecimal, and ranges of them, separated by spaces.
    """
    return "".join("-".join(chr(int(point, 16)) for point in each.split("-")) for each in ranges.split())


_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CASE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_LETTERS = _characters(
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
    "1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 "
    "2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b "
    "2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 "
    "fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943"
)
"""Letters with upper and lower case, as in DeepSeek's first tokenizers."""
_DEEPSEEK_MARKS = _characters("21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002")
_DEEPSEEK_ASIAN = f"[{_characters('4e00-9fa5 800-4e00 ac00-d7ff')}]+"
_DEEPSEEK_V3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """A rule that splits text, with settings of the tokenizers that use it."""

    make: Callable[[], pre_tokenizers.PreTokenizer]
    prefers_whole_words: bool = False
    """Whether a word that is a token is not merged from its parts."""
    adds_bos: bool = False
    """Whether prompts begin with the beginning-of-sequence token if the header does not say."""
    is_composed: bool = False
    """Whether text is normalized to composed characters (NFC)."""


def _by_patterns(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """Return a function for a rule whose patterns split the text one after the other."""

    def make() -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


def _as_gpt_2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_alone() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


_LLAMA_3 = SplitRule(_by_patterns(_WORDS % r"\p{N}{1,3}"), prefers_whole_words=True, adds_bos=True)
_CL100K = SplitRule(_by_patterns(_WORDS % r"\p{N}{1,3}"))
_SINGLE_DIGITS = SplitRule(_digits_alone)
_QWEN_2 = _by_patterns(_WORDS % r"\p{N}")
RULES: Mapping[str, SplitRule] = MappingProxyType(
    {
        "gpt-2": SplitRule(_as_gpt_2),
        "olmo": SplitRule(_as_gpt_2),
        "smollm": _SINGLE_DIGITS,
        "starcoder": _SINGLE_DIGITS,
        "refact": _SINGLE_DIGITS,
        "llama-bpe": _LLAMA_3,
        "llama3": _LLAMA_3,
        "llama-v3": _LLAMA_3,
        "dbrx": _CL100K,
        "smaug-bpe": _CL100K,
        "qwen2": SplitRule(_QWEN_2, is_composed=True),
        "deepseek-r1-qwen": SplitRule(_QWEN_2),
        "tekken": SplitRule(_by_patterns(_CASED % ("", "", r"\p{N}")), prefers_whole_words=True, adds_bos=True),
        "gpt-4o": SplitRule(_by_patterns(_CASED % (f"{_CASE}?", f"{_CASE}?", r"\p{N}{1,3}"))),
        "deepseek-llm": SplitRule(
            _by_patterns(
                "[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                rf"\s?[{_DEEPSEEK_MARKS}]+",
                r"\s+$",
                _DEEPSEEK_ASIAN,
                r"\p{N}+",
            )
        ),
        "deepseek-coder": SplitRule(_by_patterns("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_ASIAN, r"\p{N}")),
        "deepseek-v3": SplitRule(
            _by_patterns(r"\p{N}{1,3}", f"[{_characters('4e00-9fa5 3040-309f 30a0-30ff')}]+", _DEEPSEEK_V3)
        ),
    }
)
"""The rules by name."""
