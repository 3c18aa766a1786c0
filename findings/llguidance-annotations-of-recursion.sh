#!/usr/bin/env bash
# llguidance 1.9.1: a keyword that JSON Schema does not define, such as OpenAPI's `discriminator` and `nullable`, is
# ignored, but beside a recursive reference, or beside an `anyOf` of one, it makes the whole schema an error.
#
# Pydantic writes `discriminator` beside `oneOf` for a tagged union, and the helper of OpenAI for strict schemas makes
# it an `anyOf`, so the schema of every recursive tagged union, such as an expression tree, is refused. Without the
# keyword, which says nothing about values, it is accepted. Annotations of the standard, such as `description`, do not
# matter.
#
# Seen with llguidance 1.9.1:
#   nothing: accepted
#   description: accepted
#   discriminator: circular references with sibling keys are not supported: json-schema:///#/$defs/sum
#   nullable: circular references with sibling keys are not supported: json-schema:///#/$defs/sum
#   discriminator without recursion: accepted
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


def tagged(kind, **members):
    properties = {"kind": {"const": kind}, **members}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def tree(beside, last="sum"):
    term = {"anyOf": [{"$ref": "#/$defs/leaf"}, {"$ref": f"#/$defs/{last}"}], **beside}
    definitions = {"leaf": tagged("leaf"), "other": tagged("other"), "sum": tagged("sum", left=term)}
    return {"$ref": "#/$defs/sum", "$defs": definitions}


tag = {"discriminator": {"propertyName": "kind"}}
schemas = {
    "nothing": tree({}),
    "description": tree({"description": "a term"}),
    "discriminator": tree(tag),
    "nullable": tree({"nullable": True}),
    "discriminator without recursion": tree(tag, last="other"),
}
refused = []
for name, schema in schemas.items():
    matcher = LLMatcher(library, json.dumps({"grammars": [{"json_schema": schema}]}), log_level=0)
    error = matcher.get_error()
    print(f"{name}: {error or 'accepted'}")
    refused += [name] if "sibling keys" in error else []
sys.exit(refused != ["discriminator", "nullable"])
PYTHON
