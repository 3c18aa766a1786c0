"""The rules that split text cut where the published tokenizers do."""

import pytest

from kvferry.text.tokenizing.byte_level import bytes_of
from kvferry.text.tokenizing.gguf.pre_tokenizers import RULES

TEXT = "HelloWorld iPhone's DON'T 12345/ok\n\n  x 好!"
CUTS = {
    ("gpt-2", "olmo"): [
        "HelloWorld", " iPhone", "'s", " DON", "'", "T", " 12345", "/", "ok", "\n\n ", " x", " 好", "!",
    ],
    ("smollm", "starcoder", "refact"): [
        "HelloWorld", " iPhone", "'s", " DON", "'", "T", " ", *"12345", "/", "ok", "\n\n ", " x", " 好", "!",
    ],
    ("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"): [
        "HelloWorld", " iPhone", "'s", " DON", "'T", " ", "123", "45", "/ok", "\n\n", " ", " x", " 好", "!",
    ],
    ("qwen2", "deepseek-r1-qwen"): [
        "HelloWorld", " iPhone", "'s", " DON", "'T", " ", *"12345", "/ok", "\n\n", " ", " x", " 好", "!",
    ],
    ("tekken",): [
        "Hello", "World", " i", "Phone", "'s", " DON", "'T", " ", *"12345", "/ok", "\n\n", " ", " x", " 好", "!",
    ],
    ("gpt-4o",): ["Hello", "World", " i", "Phone's", " DON'T", " ", "123", "45", "/ok", "\n\n", " ", " x", " 好", "!"],
    ("deepseek-llm",): [
        "HelloWorld", " iPhone", "'", "s", " DON", "'", "T", " ", "12345", "/", "ok", "\n", "\n", " ", " x", " ", "好",
        "!",
    ],
    ("deepseek-coder",): [
        "HelloWorld", " iPhone", "'", "s", " DON", "'", "T", " ", *"12345", "/", "ok", "\n", "\n", " ", " x", " ", "好",
        "!",
    ],
    ("deepseek-v3",): [
        "HelloWorld", " iPhone", "'s", " DON", "'T", " ", "123", "45", "/ok", "\n\n", " ", " x", " ", "好", "!",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "cuts"), [(name, cuts) for names, cuts in CUTS.items() for name in names])
def test_a_rule_cuts_at_the_known_places(name: str, cuts: list[str]) -> None:
    pieces = [bytes_of(piece).decode() for piece, _ in RULES[name].make().pre_tokenize_str(TEXT)]
    assert pieces == cuts


def test_every_rule_is_tested() -> None:
    assert {name for names in CUTS for name in names} == set(RULES)


def test_deepseeks_letters_are_those_of_its_own_class() -> None:
    rule = RULES["deepseek-llm"].make()
    # Its second class contains ASCII letters, and so separates them from others. The first has no small Armenian ones.
    pieces = [bytes_of(piece).decode() for piece, _ in rule.pre_tokenize_str("naïve ΩωaՖա")]
    assert pieces == ["na", "ï", "ve", " Ωω", "a", "Ֆ", "ա"]
