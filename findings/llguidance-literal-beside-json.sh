#!/usr/bin/env bash
# llguidance 1.9.1: in an alternative of a literal and a JSON schema, a literal that begins like the JSON makes the
# schema unreachable, although both are permitted at the start.
#
# The lexer reads all permitted tokens in parallel and keeps the longest. After `{"` only the literal can go on, and the
# schema's own token `{` has no end there, so that the mask permits the literal's next character alone. Written as a
# schema of its own, the same text leaves both alternatives open.
#
# Seen with llguidance 1.9.1:
#   literal: {"name": "f"} True, {"answer": 1} False
#   schema: {"name": "f"} True, {"answer": 1} True
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
library = LLTokenizer(fast.to_str(), eos_token=256)

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def schema(name, value):
    whole = {"type": "object", "properties": {name: {"const": value}}, "required": [name], "additionalProperties": False}
    return f"%json {json.dumps({**whole, 'x-guidance': SPACING})}"


calls = {"literal": json.dumps('{"name": "f"}'), "schema": schema("name", "f")}
found = []
for kind, call in calls.items():
    grammar = f"start: call | answer\ncall: {call}\nanswer: {schema('answer', 1)}"
    matcher = LLMatcher(library, json.dumps({"grammars": [{"lark_grammar": grammar}]}), log_level=0)
    accepted = []
    for text in ('{"name": "f"}', '{"answer": 1}'):
        accepted.append(matcher.validate_tokens(list(text.encode())) == len(text))
    print(f'{kind}: {{"name": "f"}} {accepted[0]}, {{"answer": 1}} {accepted[1]}')
    found.append(accepted)
sys.exit(found != [[True, False], [True, True]])
PYTHON
