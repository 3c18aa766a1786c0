"""Grammars that spell the text of a control token: the output has its text in ordinary tokens."""

import functools
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.model.source import ModelSource
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.text.grammar.library_tokenizer import library_tokenizer, without_control_texts
from kvferry.text.tokenizing.tokenizer import Tokenizer

CONTROLS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>")


@pytest.fixture(scope="module")
def compiler(smollm: ModelSource) -> GrammarCompiler:
    return GrammarCompiler(smollm.tokenizer)


def output(compiler: GrammarCompiler, tokenizer: Tokenizer, of: Constraint) -> list[int]:
    """Return an output without its end-of-sequence token, taking the first allowed token that is not whitespace."""
    state = compiler.compile(of).start()
    ids: list[int] = []
    while len(ids) < 100:
        token = next(i for i in np.flatnonzero(state.allowed()).tolist() if not tokenizer.token_bytes(i).isspace())
        if token in tokenizer.eos_token_ids:
            return ids
        ids.append(token)
        state.advance([token])
    raise AssertionError("the output does not end")


@pytest.mark.parametrize("text", ["\ufdd01\ufdd1", "a\ufdd02\ufdd1b", "<|nope|>"])
def test_no_text_of_a_request_is_a_control_token_for_the_library(compiler, smollm, text) -> None:
    of = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"const": text}))
    assert smollm.tokenizer.decode(output(compiler, smollm.tokenizer, of)) == json.dumps(text, ensure_ascii=False)
    first, second = (without_control_texts(smollm.tokenizer) for _ in range(2))
    assert first != second, "the names are random"


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (ConstraintKind.JSON_SCHEMA, '{{"const": "a{0}b"}}'),
        (ConstraintKind.JSON_SCHEMA, '{{"enum": ["{0}"]}}'),
        (
            ConstraintKind.JSON_SCHEMA,
            (
                '{{"type": "object", "required": ["{0}"], "properties": {{"{0}": {{"const": 1}}}}, '
                '"additionalProperties": false}}'
            ),
        ),
        (ConstraintKind.CHOICE, '["{0}x"]'),
        (ConstraintKind.REGEX, "a{0}b"),
        (ConstraintKind.GRAMMAR, 'start: "a{0}b"'),
        (ConstraintKind.GRAMMAR, 'start: %json {{"const": "{0}"}}'),
        (ConstraintKind.GRAMMAR, 'root ::= "a{0}"'),
    ],
)
def test_an_output_spells_the_text_of_a_control_token(compiler, smollm, kind, source, control) -> None:
    written = control.replace("|", "\\|") if kind is ConstraintKind.REGEX else control
    ids = output(compiler, smollm.tokenizer, Constraint(kind, source.format(written)))
    assert not any(map(smollm.tokenizer.is_control, ids))
    assert control in smollm.tokenizer.decode(ids)


@pytest.mark.parametrize("source", ['start: "a" <|im_start|> "b"', 'start: "a" <[1]> "b"'])
def test_a_grammar_names_a_control_token_by_text_or_id(compiler, smollm, source) -> None:
    ids = output(compiler, smollm.tokenizer, Constraint(ConstraintKind.GRAMMAR, source))
    assert ids[1:-1] == [smollm.tokenizer.control_tokens["<|im_start|>"].token_id]


def test_a_structural_tag_may_be_triggered_by_a_control_token(compiler, smollm) -> None:
    tag = {"begin": "<|im_start|>f", "schema": {"const": "<|im_start|>"}, "end": ";"}
    source = json.dumps({"structures": [tag], "triggers": ["<|im_start|>"]})
    state = compiler.compile(Constraint(ConstraintKind.STRUCTURAL_TAG, source)).start()
    state.advance([smollm.tokenizer.control_tokens["<|im_start|>"].token_id])
    assert smollm.tokenizer.decode(state.forced_tokens()) == 'f"<|im_start|>'


def special(text: str) -> AddedToken:
    return AddedToken(text, special=True)


MODELS = {
    "BPE": lambda: models.BPE(vocab={"<s>": 0, "</s>": 1, "<": 2, "s": 3, ">": 4, "/": 5}, merges=[], unk_token="<s>"),
    "Unigram": lambda: models.Unigram([("<s>", 0.0), ("</s>", 0.0), ("<", -1.0), ("s", -1.0), (">", -1.0)], unk_id=0),
    "WordLevel": lambda: models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="<s>"),
}


@pytest.mark.parametrize("name", MODELS)
def test_ids_stay_and_texts_of_control_tokens_go(name) -> None:
    def make() -> tokenizers.Tokenizer:
        made = tokenizers.Tokenizer(MODELS[name]())
        made.add_special_tokens([special("<s>"), special("</s>"), special("<new>")])
        made.add_tokens(["<call>"])
        return made

    tokenizer = Tokenizer(make, vocab_size=16, eos_token_ids=(1,))
    changed = tokenizers.Tokenizer.from_str(without_control_texts(tokenizer))
    assert changed.get_vocab_size() == tokenizer.num_tokens
    for text, token_id in make().get_vocab().items():
        renamed = text in tokenizer.control_tokens
        assert (changed.id_to_token(token_id) == text) != renamed
        assert changed.token_to_id(text) == (None if renamed else token_id)


_library = functools.cache(library_tokenizer)


@settings(deadline=None)
@given(st.text(max_size=20))
def test_other_text_has_the_ids_of_the_model(smollm, text) -> None:
    library = _library(smollm.tokenizer)
    if not any(control in text for control in smollm.tokenizer.control_tokens):
        assert library.tokenize_str(text) == smollm.tokenizer.encode(text, add_special=False)
