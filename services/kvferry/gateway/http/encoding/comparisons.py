"""Text similarity: scores of pairs in vLLM's format, and documents in order of relevance in the format of Jina and
Cohere.

A score is the cosine similarity of two vectors of the served model, from -1 to 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field, PlainValidator

from kvferry.core.errors import InvalidRequest
from kvferry.gateway.http.encoding.bodies import Answered, Items, VectorBody, check_count, check_texts, parse
from kvferry.gateway.http.encoding.vectors import (
    VectorInputs,
    VectorUsage,
    compute_vectors,
    names_of,
    read_inputs,
    usage_of,
)
from kvferry.gateway.http.fields import field_policy
from kvferry.gateway.http.fields.field_policy import Rules
from kvferry.gateway.http.fields.strict import Strict, shown
from kvferry.gateway.http.openai.reply import encode
from kvferry.serving.embedding import MAX_INPUTS
from kvferry.serving.request import Caller
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_service import TextService
from kvferry.serving.token_source import Vector
from kvferry.text.requests.pooling import cosine

_MAX_TEXTS = MAX_INPUTS // 2
_MAX_DOCUMENTS = MAX_INPUTS - 1


def _check_documents(value: object) -> list[str]:
    if not isinstance(value, list):
        raise InvalidRequest(f"documents must be a list, not {shown(value)}", field="documents")
    check_count("documents", value, _MAX_DOCUMENTS)
    texts: list[str] = []
    for number, document in enumerate(value):
        text = document["text"] if isinstance(document, dict) and document.keys() == {"text"} else document
        if not isinstance(text, str):
            where = f"documents.{number}"
            raise InvalidRequest(
                f"{where} must be a string, or an object with only the field text, not {shown(document)}", field=where
            )
        texts.append(text)
    return texts


class ScoreObject(Struct):
    """The similarity of one text pair."""

    index: int
    score: float
    object: str = "score"


class ScoreList(Struct):
    """Response of POST /v1/score."""

    id: str
    created: int
    model: str
    data: list[ScoreObject]
    usage: VectorUsage
    object: str = "list"


class Document(Struct):
    """A document of a request."""

    text: str


class Ranked(Struct):
    """A document's relevance, with the document if it was requested."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(Struct):
    """Response of POST /v1/rerank: documents in descending order of relevance."""

    id: str
    model: str
    usage: VectorUsage
    results: list[Ranked]


class DocumentInput(Strict):
    """A document of a request as an object."""

    text: str


class ScoreBody(VectorBody):
    """Body of POST /v1/score."""

    RULES: ClassVar[Rules] = field_policy.SCORE

    text_1: Annotated[
        list[str],
        PlainValidator(lambda value: check_texts("text_1", value, _MAX_TEXTS), json_schema_input_type=str | Items[str]),
    ]
    text_2: Annotated[
        list[str],
        PlainValidator(
            lambda value: check_texts("text_2", value, _MAX_DOCUMENTS), json_schema_input_type=str | Items[str]
        ),
    ]


class RerankBody(VectorBody):
    """Body of POST /v1/rerank."""

    RULES: ClassVar[Rules] = field_policy.RERANK

    query: str
    documents: Annotated[list[str], PlainValidator(_check_documents, json_schema_input_type=Items[str | DocumentInput])]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """Number of documents to return; `None` and 0 return all."""
    return_documents: bool = True


@dataclass(frozen=True, slots=True)
class ReadTexts:
    """The texts of a valid body."""

    inputs: VectorInputs
    pairs: list[tuple[int, int]]
    """Indices of the texts to compare."""
    documents: Sequence[str] = ()
    """Texts to return with their scores; empty if none are returned."""
    top_n: int = 0
    ignored: tuple[str, ...] = ()
    """Names of the fields without effect."""


def read_score(model: TextModel, body: bytes, context_tokens: int, *, is_strict: bool) -> ReadTexts:
    """Parse the body of a score request and tokenize its texts.

    Args:
        model: the served model.
        body: JSON body of the request.
        context_tokens: maximum number of tokens of one text.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    request = parse(ScoreBody, model, body, is_strict=is_strict)
    left, right = len(request.text_1), len(request.text_2)
    if left not in (1, right):
        raise InvalidRequest(
            f"text_1 has {left} items and text_2 has {right}; send one item in text_1, or as many as in text_2",
            field="text_1",
        )
    names = [*names_of("text_1", left), *names_of("text_2", right)]
    return ReadTexts(
        read_inputs(model, request, [*request.text_1, *request.text_2], names, context_tokens),
        [(index if left > 1 else 0, left + index) for index in range(right)],
        ignored=request.ignored,
    )


def read_rerank(model: TextModel, body: bytes, context_tokens: int, *, is_strict: bool) -> ReadTexts:
    """Parse the body of a rerank request and tokenize its texts.

    Args:
        model: the served model.
        body: JSON body of the request.
        context_tokens: maximum number of tokens of one text.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    request = parse(RerankBody, model, body, is_strict=is_strict)
    names = ["query", *(f"documents.{number}" for number in range(len(request.documents)))]
    return ReadTexts(
        read_inputs(model, request, [request.query, *request.documents], names, context_tokens),
        [(0, 1 + index) for index in range(len(request.documents))],
        request.documents if request.return_documents else (),
        request.top_n or 0,
        request.ignored,
    )


async def answer_score(service: TextService, caller: Caller, body: bytes, *, is_strict: bool) -> Answered:
    """Answer POST /v1/score.

    Raises:
        KvferryError: the request is invalid, or could not be computed.
    """
    request = await service.read(caller.client, read_score, len(body), body, service.served_tokens, is_strict=is_strict)
    vectors, scores = await _compare(service, caller, request, "text_2")
    answer = ScoreList(
        f"score-{caller.request_id}",
        created=int(service.clock.wall()),
        model=service.model.name,
        data=[ScoreObject(index, score) for index, score in enumerate(scores)],
        usage=usage_of(vectors),
    )
    return encode(answer), request.ignored


async def answer_rerank(service: TextService, caller: Caller, body: bytes, *, is_strict: bool) -> Answered:
    """Answer POST /v1/rerank: documents in descending order of relevance, equally relevant ones in the given order.

    Raises:
        KvferryError: the request is invalid, or could not be computed.
    """
    request = await service.read(
        caller.client, read_rerank, len(body), body, service.served_tokens, is_strict=is_strict
    )
    vectors, scores = await _compare(service, caller, request, "documents")
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[Ranked] = []
    for index in ranked[: request.top_n or None]:
        document = Document(request.documents[index]) if request.documents else UNSET
        results.append(Ranked(index, scores[index], document))
    answer = Ranking(f"rerank-{caller.request_id}", service.model.name, usage_of(vectors), results)
    return encode(answer), request.ignored


async def _compare(
    service: TextService, caller: Caller, request: ReadTexts, field: str
) -> tuple[list[Vector], list[float]]:
    vectors = await compute_vectors(service, caller, request.inputs, field)
    return vectors, [cosine(vectors[left].values, vectors[right].values) for left, right in request.pairs]
