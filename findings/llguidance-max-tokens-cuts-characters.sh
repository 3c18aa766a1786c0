#!/usr/bin/env bash
# llguidance 1.9.1 ends a rule with `max_tokens` in the middle of a character, and then accepts the whole output.
#
# Without `max_tokens`, the rule `/(?s:.*)/` matches complete characters only: after the first byte of "é" the next rule
# is not offered. With `[max_tokens=3]` the third token may be that first byte: the next rule is then the only one
# offered, its token is consumed, and the output, which is no UTF-8, counts as accepted. A reader of the tokens must
# decode such a part with a replacement character.
#
# Seen with llguidance 1.9.1 and tokenizers 0.23.3:
#   no limit: offered after a half character: bytes
#   3 tokens: offered after a half character: <stop>; then accepted: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 tokenizers==0.23.3 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def characters():
    """The characters by which byte-level vocabularies write bytes, in the order of the bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


END, STOP = 256, 257
fast = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(characters())}, merges=[]))
fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
fast.decoder = decoders.ByteLevel()
fast.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<stop>", special=True)])
library = LLTokenizer(fast.to_str(), eos_token=END)


def offered(matcher):
    mask = allocate_token_bitmask(1, library.vocab_size)
    fill_next_token_bitmask(matcher, mask)
    return [int(one) for one in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def after_half_a_character(limit):
    grammar = f"start: text <stop>\ntext{limit}: /(?s:.*)/"
    matcher = LLMatcher(library, json.dumps({"grammars": [{"lark_grammar": grammar}]}), log_level=0)
    for token in (*b"ab", "é".encode()[0]):
        assert matcher.consume_token(token)
    return matcher, offered(matcher)


free, without = after_half_a_character("")
limited, with_limit = after_half_a_character("[max_tokens=3]")
is_bytes = STOP not in without and all(token < 256 for token in without)
print("no limit: offered after a half character:", "bytes" if is_bytes else without)
accepted = with_limit == [STOP] and limited.consume_token(STOP) and limited.is_accepting()
print("3 tokens: offered after a half character:", "<stop>" if with_limit == [STOP] else with_limit, end="; ")
print("then accepted:", accepted)
sys.exit(not (is_bytes and accepted))
PYTHON
