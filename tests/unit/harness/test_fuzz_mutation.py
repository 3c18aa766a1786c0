"""Mutated documents of the fuzzer stay small however often they are mutated."""

import json
from random import Random

import msgspec
import pytest
from harness.fuzz.mutation import MAX_PARTS, json_at_random, packed_at_random

_DOCUMENT = [[["x" * 5000] * 8] * 8] * 8
_MAX_BYTES = MAX_PARTS * 64 * 6  # a character takes up to six bytes of JSON


@pytest.mark.parametrize("seed", range(40))
def test_repeated_mutation_keeps_a_document_small(seed: int) -> None:
    random = Random(seed)
    text, packed = json.dumps(_DOCUMENT).encode(), msgspec.msgpack.encode(_DOCUMENT)
    for _ in range(20):
        text, packed = json_at_random(text, random), packed_at_random(packed, random)
        assert len(text) <= _MAX_BYTES
        assert len(packed) <= _MAX_BYTES
