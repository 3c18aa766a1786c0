#!/usr/bin/env bash
# llguidance 1.9.1: deep copies of a matcher share the lexer's states and their limit. A matcher that is kept and copied
# for each output therefore stops working after some hundred outputs, each of which a new matcher takes without an error.
#
# LLMatcher.deep_copy() is what an engine calls to begin an output from a compiled grammar. States that one copy visits
# stay in the lexer that all copies use, also after the copy is gone, and count towards LLParserLimits.max_lexer_states
# (250,000 by default). From the moment at which the limit is reached, every copy that needs one more state fails with
# "too many states", whatever its own output is. reset() does not drop them; only compiling the grammar again does.
#
# Seen with llguidance 1.9.1, a byte vocabulary, limit 200, 60 outputs of the expression below:
#   new matcher for each output: 60 of 60 complete
#   copies of one matcher: the first 8 complete, none after them; the error is "too many states: 200 >= 200"
#   after reset(): 0 of 60 complete
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 numpy==2.3.5
cat > "$folder/states.py" <<'PYTHON'
import random

import llguidance
import llguidance.numpy
import numpy as np

OUTPUTS, LIMIT = 60, 200
GRAMMAR = llguidance.LLMatcher.grammar_from_regex("(a|b)*a(a|b){10}c")
TOKENIZER = llguidance.LLTokenizer("byte")
BITS = llguidance.numpy.allocate_token_bitmask(1, TOKENIZER.vocab_size)


def compiled():
    limits = llguidance.LLParserLimits(max_lexer_states=LIMIT)
    return llguidance.LLMatcher(TOKENIZER, GRAMMAR, log_level=0, limits=limits)


def draw(matcher, seed):
    """Draw allowed tokens until the output is complete; return the matcher's error."""
    rng = random.Random(seed)
    for _ in range(80):
        llguidance.numpy.fill_next_token_bitmask(matcher, BITS, 0)
        if matcher.is_error():
            return matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(BITS[0].view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed.tolist()))
        if token == TOKENIZER.eos_token:
            return ""
        if not matcher.consume_token(token):
            return matcher.get_error()
        if matcher.is_stopped():
            return ""
    return ""


alone = [draw(compiled(), seed) for seed in range(OUTPUTS)]
kept = compiled()
shared = [draw(kept.deep_copy(), seed) for seed in range(OUTPUTS)]
kept.reset()
after = [draw(kept.deep_copy(), seed) for seed in range(OUTPUTS)]
print(f"new matcher for each output: {alone.count('')} of {OUTPUTS} complete")
print(f"copies of one matcher: {shared.count('')} of {OUTPUTS} complete, in the first half {shared[:30].count('')}")
print(f"after reset(): {after.count('')} of {OUTPUTS} complete")
print("error:", next(error for error in shared if error).splitlines()[0])
assert alone.count("") == OUTPUTS
assert shared.count("") < OUTPUTS and shared[30:].count("") < shared[:30].count("")
assert after.count("") < OUTPUTS // 2
assert all("too many states" in error for error in (*shared, *after) if error)
PYTHON
"$folder/venv/bin/python" "$folder/states.py"
