#!/usr/bin/env bash
# llguidance 1.9.1 takes an added token of the form <...> for a special token, whatever its flag `special` says.
#
# A tokenizer.json may have `<tool_call>` as an added token with "special": false, as those of Qwen 2.5 and 3 have. A
# grammar whose only text is "<tool_call>x" then offers the token <tool_call>, alone, as the next one, and rejects it
# when it is consumed: the text is spelled by ordinary tokens only, but the tokenization of the forced text has the
# added token. A token that is not of this form, such as [TOOL_CALLS], works.
#
# Seen with llguidance 1.9.1 and tokenizers 0.23.3:
#   <tool_call>: offered True, taken False
#   [TOOL_CALLS]: offered True, taken True
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


found = []
for text in ("<tool_call>", "[TOOL_CALLS]"):
    fast = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(characters())}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<|end|>", special=True)])
    fast.add_tokens([AddedToken(text, special=False)])
    library = LLTokenizer(fast.to_str(), eos_token=256)
    matcher = LLMatcher(library, json.dumps({"grammars": [{"lark_grammar": f'start: "{text}x"'}]}), log_level=0)
    mask = allocate_token_bitmask(1, library.vocab_size)
    fill_next_token_bitmask(matcher, mask)
    offered = bool(np.unpackbits(mask.view(np.uint8), bitorder="little")[257])
    taken = bool(matcher.consume_token(257))
    print(f"{text}: offered {offered}, taken {taken}")
    found.append((offered, taken))
sys.exit(found != [(True, False), (True, True)])
PYTHON
