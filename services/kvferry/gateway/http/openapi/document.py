"""Generates the OpenAPI 3.1 document from the table of operations.

Bodies come from pydantic's schemas of the models that validate them, answers from msgspec's schemas of the structs that
are encoded, errors from the error classes. Component names of nested objects in bodies end in `Param`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from kvferry.core.errors import KvferryError, ResumeRefused
from kvferry.gateway.http.fields.strict import Strict
from kvferry.gateway.http.openapi.operations import OPERATIONS, Operation
from kvferry.rpc.wire import MAX_REQUEST_ID_CHARS

JSON, EVENTS = "application/json", "text/event-stream"
_REF = "#/components/schemas/"
_PLACE = re.compile(r"{(\w+)(?::path)?}")
_KEY = "apiKey"
_REQUEST_ID = {"type": "string", "pattern": f"^[A-Za-z0-9_.:-]{{1,{MAX_REQUEST_ID_CHARS}}}$"}
_HEADERS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "x-request-id",
        "Id of the request, returned with the answer; a new one if it is left out or has other characters.",
        {},
    ),
    ("traceparent", "Position in the client's trace (W3C Trace Context). An invalid value is ignored.", {}),
)
_POSITION: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "last-event-id",
        "Id of the last event of a stream that a client has received; the answer is the rest of the stream.",
        {},
    ),
)
_IGNORED = {
    "kvferry-ignored": {
        "description": "Fields of the request that had no effect, separated by commas; absent if there are none.",
        "schema": {"type": "string"},
    }
}
_PROTOCOL = {
    408: "The headers or the body did not arrive in time.",
    431: "The headers are too large or too many.",
    501: "The body has a transfer coding other than chunked.",
}
"""Connection errors, which are possible on every route."""


def openapi_document(version: str, *, needs_key: bool, operations: Iterable[Operation] = OPERATIONS) -> dict[str, Any]:
    """Return the document as a JSON object.

    Args:
        version: version of the API.
        needs_key: whether requests need an API key; otherwise a key is accepted and ignored.
        operations: routes to describe.
    """
    operations = list(operations)
    bodies = _body_schemas([op.body for op in operations if op.body is not None])
    kinds = {_name(kind): kind for op in operations for kind in _answers(op)}
    failures = {op.failure: None for op in operations}
    schemas, components = msgspec.json.schema_components([*kinds.values(), *failures], ref_template=_REF + "{name}")
    answers = dict(zip(kinds, schemas, strict=False))
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for op in operations:
        paths[_PLACE.sub(r"{\1}", op.path)][op.method.lower()] = _operation(op, answers, needs_key=needs_key)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvferry",
            "version": version,
            "description": "OpenAI-compatible serving of one model and its adapters.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": dict(paths),
        "components": {
            "schemas": {**bodies, **_without_tuples(components)},
            "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer"}},
        },
    }


def _without_tuples(schema: Any) -> Any:
    """Return a schema whose tuples are arrays of a fixed length: generators of clients do not read `prefixItems`."""
    if isinstance(schema, list):
        return [_without_tuples(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _without_tuples(value) for key, value in schema.items() if key != "prefixItems"}
    if isinstance(kinds := schema.get("prefixItems"), list):
        made |= {"items": {"anyOf": _without_tuples(kinds)}, "minItems": len(kinds), "maxItems": len(kinds)}
    return made


def _operation(op: Operation, answers: Mapping[str, Any], *, needs_key: bool) -> dict[str, Any]:
    content: dict[str, Any] = {op.answer_media: {"schema": answers[_name(op.answer)]}}
    if op.event is not None:
        content[EVENTS] = {"schema": _event_schema(op, answers[_name(op.event)])}
    headers = _id_header() if op.body is None else {"headers": {**_id_header()["headers"], **_IGNORED}}
    responses: dict[str, Any] = {str(op.status): {"description": "The answer.", **headers, "content": content}}
    for status, kind in (op.also or {}).items():
        responses[str(status)] = _response("The answer.", answers[_name(kind)])
    body_ref = {"$ref": f"{_REF}{op.failure.__name__}"}
    for status, text in _error_texts(op).items():
        if str(status) not in responses:
            responses[str(status)] = _response(text, body_ref)
    made: dict[str, Any] = {
        "operationId": op.name,
        "summary": op.summary,
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in _PLACE.findall(op.path)
            ),
            *_query(op),
            *(
                {"name": name, "in": "header", "description": text, "schema": {"type": "string", **schema}}
                for name, text, schema in (*_HEADERS, *(_POSITION if ResumeRefused in op.errors else ()))
            ),
        ],
        "responses": dict(sorted(responses.items())),
    }
    if op.body is not None:
        content = {op.media: {"schema": {"$ref": f"{_REF}{_param(op.body.__name__, True)}"}}}
        made["requestBody"] = {"required": True, "content": content}
    if op.has_key:
        made["security"] = [{_KEY: []}] if needs_key else [{_KEY: []}, {}]
    return made


def _event_schema(op: Operation, payload: object) -> dict[str, Any]:
    """Return the schema of one event of a stream: its name, if it has one, and its data, which is JSON."""
    payloads = [payload, {"$ref": f"{_REF}{op.failure.__name__}"}] if op.has_done else [payload]
    data: dict[str, Any] = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": payloads}}
    if op.has_done:
        data = {"anyOf": [{"const": "[DONE]", "description": "The end of a stream without an error."}, data]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


def _query(op: Operation) -> list[dict[str, Any]]:
    if op.query is None:
        return []
    properties = op.query.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]


def _error_texts(op: Operation) -> Mapping[int, str]:
    by_status: dict[int, list[type[KvferryError]]] = defaultdict(list)
    for kind in op.errors:
        by_status[kind.http_status].append(kind)
    texts = dict(_PROTOCOL)
    for status, kinds in by_status.items():
        texts[status] = " ".join(f"`{kind.reason.lower()}`: {_first_line(kind)}" for kind in kinds)
    return texts


def _first_line(kind: type[KvferryError]) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _response(text: str, schema: object) -> dict[str, Any]:
    return {"description": text, **_id_header(), "content": {JSON: {"schema": schema}}}


def _id_header() -> dict[str, Any]:
    return {"headers": {"x-request-id": {"schema": _REQUEST_ID}}}


def _answers(op: Operation) -> list[Any]:
    return [kind for kind in (op.answer, op.event, *(op.also or {}).values()) if kind is not None]


def _name(kind: Any) -> str:
    return str(kind)


def _body_schemas(bodies: Iterable[type[Strict]]) -> dict[str, Any]:
    """Return the schemas of all bodies and their parts by component name."""
    given = list(dict.fromkeys(bodies))
    whole = {body.__name__ for body in given}
    _, schema = models_json_schema([(body, "validation") for body in given], ref_template=_REF + "{model}")
    definitions: dict[str, Any] = _renamed(schema.get("$defs", {}), whole)
    return {_param(name, name in whole): definition for name, definition in definitions.items()}


def _renamed(value: Any, whole: set[str]) -> Any:
    if isinstance(value, list):
        return [_renamed(item, whole) for item in value]
    if not isinstance(value, dict):
        return value
    found = {name: _renamed(item, whole) for name, item in value.items()}
    reference = found.get("$ref")
    if isinstance(reference, str) and reference.startswith(_REF):
        name = reference.removeprefix(_REF)
        found["$ref"] = _REF + _param(name, name in whole)
    return found


def _param(name: str, is_whole: bool) -> str:
    return name if is_whole else f"{name}Param"
