"""The error classes: each has a gRPC and an HTTP status that agree, and the documented tree is complete."""

import re

import grpc
import pytest

from kvferry.core import errors
from kvferry.core.errors import InvalidRequest, KvferryError, Overloaded

CLASSES = [
    c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, KvferryError) and c is not KvferryError
]
# HTTP codes that mean the same failure as a gRPC code: the mapping of google.rpc.Code, 412 for a precondition that the
# caller may drop, 422 for a request that must not be retried, and 500 where the server is at fault.
AGREE = {
    "INVALID_ARGUMENT": {400},
    "UNAUTHENTICATED": {401},
    "PERMISSION_DENIED": {403},
    "NOT_FOUND": {404},
    "RESOURCE_EXHAUSTED": {429},
    "ABORTED": {409},
    "CANCELLED": {499},
    "UNAVAILABLE": {503},
    "DEADLINE_EXCEEDED": {504},
    "FAILED_PRECONDITION": {412, 422, 500},
    "INTERNAL": {500},
}


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_has_statuses_that_exist_and_agree(kind: type[KvferryError]) -> None:
    assert kind.grpc_status in grpc.StatusCode.__members__
    assert kind.http_status in AGREE[kind.grpc_status]
    assert re.fullmatch(r"[A-Z][A-Z_]*[A-Z]", kind.reason)
    assert kind.__doc__


def test_reasons_distinguish_the_classes() -> None:
    assert len({kind.reason for kind in CLASSES}) == len(CLASSES)


def test_the_drawing_is_the_tree() -> None:
    drawn = re.findall(r"[├└]── (\w+) +(\w+) +(\d+)", errors.__doc__ or "")
    assert drawn == [(kind.__name__, kind.grpc_status, str(kind.http_status)) for kind in CLASSES]


def test_an_error_has_message_reason_field_and_retry_time() -> None:
    error = Overloaded("12 wait; come back later", reason="QUEUE_FULL", field="prompt", retry_after_seconds=1.5)
    assert (str(error), error.message) == ("12 wait; come back later",) * 2
    assert (error.reason, error.field, error.retry_after_seconds) == ("QUEUE_FULL", "prompt", 1.5)


def test_a_reason_given_to_an_error_does_not_change_its_class() -> None:
    assert InvalidRequest("a", reason="PROMPT_EMPTY").reason == "PROMPT_EMPTY"
    assert InvalidRequest("a").reason == InvalidRequest.reason == "INVALID_REQUEST"


def test_texts_of_an_error_can_be_encoded() -> None:
    error = InvalidRequest("a \ud800 in a file", field="\udfff\u00e9")
    assert (error.message, str(error), error.field) == ("a \\ud800 in a file", "a \\ud800 in a file", "\\udfff\u00e9")
