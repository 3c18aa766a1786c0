#!/usr/bin/env bash
# llguidance 1.9.1: beyond 2^53, the bound of a `number` is compared as the shortest digits of its double, filled with
# zeros, so that values above a maximum are generated. The bound of an `integer` is exact.
#
# The double 2^60 is 1152921504606846976, and its shortest digits are 1152921504606847, filled up to
# 1152921504606847000: a number up to that one passes. Schemas of 64-bit columns, which have `"maximum":
# 9223372036854775807` and the like, have such bounds.
#
# Seen with llguidance 1.9.1, maximum 2^60 = 1152921504606846976:
#   number: 2^60 True, 2^60 + 1 True, 2^60 + 24 True, 2^60 + 25 False
#   integer: 2^60 True, 2^60 + 1 False, 2^60 + 24 False, 2^60 + 25 False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 tokenizers==0.23.3 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
others = iter(range(256, 512))
characters = [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
fast = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(characters)}, merges=[]))
fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
fast.decoder = decoders.ByteLevel()
fast.add_special_tokens([AddedToken("<|end|>", special=True)])
END = fast.token_to_id("<|end|>")
library = LLTokenizer(fast.to_str(), eos_token=END)
vocabulary = fast.get_vocab()


def accepts(kind, number):
    grammar = json.dumps({"grammars": [{"json_schema": {"type": kind, "maximum": 2**60}}]})
    matcher = LLMatcher(library, grammar, log_level=0)
    tokens = [*(vocabulary[character] for character in str(number)), END]
    return matcher.validate_tokens(tokens) == len(tokens)


found = {}
for kind in ("number", "integer"):
    found[kind] = [accepts(kind, 2**60 + more) for more in (0, 1, 24, 25)]
    names = ("2^60", "2^60 + 1", "2^60 + 24", "2^60 + 25")
    print(f"{kind}: {', '.join(f'{name} {is_ok}' for name, is_ok in zip(names, found[kind]))}")
sys.exit(found != {"number": [True, True, True, False], "integer": [True, False, False, False]})
PYTHON
