"""The embedded model under hundreds of JSON Schemas: every output that ends by itself follows its schema."""

import json
from dataclasses import replace

import jsonschema
import pytest
from harness.schemas.chosen import CHOSEN
from harness.schemas.generated import generated

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.sampling import FinishReason, SamplingParams
from kvferry.engine import LLM

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

SAMPLED = SamplingParams(temperature=0.7, max_tokens=160)
LEAST_COMPLETE = 0.5
"""Share of outputs that must end before `max_tokens`; the model tends to long strings and arrays."""


def test_outputs_of_the_embedded_model_follow_their_schemas() -> None:
    schemas = [*CHOSEN.values(), *(generated(seed) for seed in range(500))]
    sources = [json.dumps(schema, ensure_ascii=False) for schema in schemas]
    params = [
        replace(SAMPLED, seed=number, constraint=Constraint(ConstraintKind.JSON_SCHEMA, source))
        for number, source in enumerate(sources)
    ]
    prompts = [f"A JSON value that follows the schema {source[:600]}:\n" for source in sources]
    made = LLM("smollm2-135m-instruct").generate(prompts, params)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    complete = [
        (one, schema) for one, schema in zip(made, schemas, strict=True) if one.finish_reason is FinishReason.STOP
    ]
    for one, schema in complete:
        jsonschema.validate(json.loads(one.text), schema, format_checker=checker)
    assert len(complete) >= LEAST_COMPLETE * len(schemas), (
        f"only {len(complete)} of {len(schemas)} outputs are complete"
    )
