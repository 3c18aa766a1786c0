"""The routes of the client API: path, body, answer and errors of each. The server's routes are generated from this
table.

| errors | of |
| --- | --- |
| `EDGE` | every route: requests that are not valid HTTP, unknown paths, internal errors |
| `KEYED` | routes that check the API key |
| `BODY` | routes with a body: its type, size, time and content |
| `COMPUTED` | routes that compute on workers |
| `STREAMED` | routes whose streams another gateway can continue |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.core.errors import (
    DeadlinePassed,
    Forbidden,
    GenerationFailed,
    InvalidRequest,
    InvariantBroken,
    KvferryError,
    Overloaded,
    RequestRefused,
    ResumeRefused,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from kvferry.gateway.batches.batch_errors import NoSuchBatch, NoSuchFile, WrongState
from kvferry.gateway.http.batches.bodies import (
    BatchesQuery,
    BatchList,
    BatchObject,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
    FilesQuery,
    FileUpload,
)
from kvferry.gateway.http.batches.routes import OCTETS
from kvferry.gateway.http.batches.switched_off import BatchesOff
from kvferry.gateway.http.body_route import JSON, BodyTooLarge, BodyTooSlow, UnsupportedMedia
from kvferry.gateway.http.encoding.comparisons import Ranking, RerankBody, ScoreBody, ScoreList
from kvferry.gateway.http.encoding.embeddings import EmbeddingList, EmbeddingObject, EmbeddingsBody
from kvferry.gateway.http.encoding.token_ids import DetokenizeBody, TokenIds, TokenizeBody, TokenText
from kvferry.gateway.http.fields.strict import Strict
from kvferry.gateway.http.messages import output as messages
from kvferry.gateway.http.messages.body import CountTokensRequest, MessageRequest
from kvferry.gateway.http.openai import reply
from kvferry.gateway.http.openai.schema import ChatRequest, CompletionRequest
from kvferry.gateway.http.openai.token_generation import TokenReply, TokenRequest
from kvferry.gateway.http.responses.body import ResponseRequest
from kvferry.gateway.http.responses.compaction import CompactRequest
from kvferry.gateway.http.responses.output import (
    AnyEvent,
    CompactedResponse,
    DeletedResponse,
    InputTokens,
    ItemList,
    Response,
)
from kvferry.gateway.http.responses.routes import ItemsQuery, RetrieveQuery
from kvferry.gateway.http.responses.store import ResponseNotFound
from kvferry.gateway.http.route_errors import MethodNotAllowed, NoSuchRoute
from kvferry.gateway.http.status_bodies import Alive, EndedRequest, Ready, Version

Errors = tuple[type[KvferryError], ...]
EDGE: Errors = (InvalidRequest, InvariantBroken)
KEYED: Errors = (*EDGE, Unauthenticated, Overloaded)
BODY: Errors = (*KEYED, UnknownModel, BodyTooSlow, BodyTooLarge, UnsupportedMedia, Unavailable)
COMPUTED: Errors = (*BODY, Forbidden, RequestRefused, GenerationFailed, DeadlinePassed)
STREAMED: Errors = (*COMPUTED, ResumeRefused)
"""Errors of routes whose streams another gateway can continue."""
KEPT: Errors = (*KEYED, BatchesOff, Unavailable)
"""Errors of routes of files and batches."""
ROUTING: Errors = (NoSuchRoute, MethodNotAllowed)
"""Errors of paths and methods that are not in the table."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One route and its method."""

    name: str
    """Identifier of the operation, for generated clients."""
    method: str
    path: str
    """Path in Starlette's form."""
    summary: str
    answer: Any
    """Type of the answer; a struct that msgspec encodes."""
    body: type[Strict] | None = None
    event: Any = None
    """Type of the events of a stream; `None` if the route does not stream."""
    has_done: bool = False
    """Whether a stream that does not fail ends with the event `[DONE]`."""
    errors: Errors = EDGE
    query: type[Strict] | None = None
    """Parameters of the query; `None` if there are none."""
    also: Mapping[int, Any] | None = None
    """Types of answers by status, other than `status`; `None` if there are none."""
    status: int = 200
    media: str = JSON
    """Media type of the body."""
    answer_media: str = JSON
    """Media type of the answer."""
    failure: Any = reply.ErrorBody
    """Type of the body of errors."""

    @property
    def is_computed(self) -> bool:
        """Whether workers compute the answer."""
        return DeadlinePassed in self.errors

    @property
    def has_key(self) -> bool:
        """Whether the route checks the API key."""
        return Unauthenticated in self.errors


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "createChatCompletion",
        "POST",
        "/v1/chat/completions",
        "Answers a conversation.",
        reply.Reply[reply.ChatChoice],
        ChatRequest,
        reply.Reply[reply.ChunkChoice],
        has_done=True,
        errors=STREAMED,
    ),
    Operation(
        "createResponse",
        "POST",
        "/v1/responses",
        "Answers a conversation; the answer may be stored for the next turn.",
        Response,
        ResponseRequest,
        AnyEvent,
        errors=(*COMPUTED, ResponseNotFound),
    ),
    Operation(
        "countResponseTokens",
        "POST",
        "/v1/responses/input_tokens",
        "Counts the tokens of a conversation.",
        InputTokens,
        ResponseRequest,
        errors=(*BODY, ResponseNotFound),
    ),
    Operation(
        "compactResponse",
        "POST",
        "/v1/responses/compact",
        "Summarizes a conversation, so that it can be continued from the summary.",
        CompactedResponse,
        CompactRequest,
        errors=(*COMPUTED, ResponseNotFound),
    ),
    Operation(
        "createMessage",
        "POST",
        "/v1/messages",
        "Answers a conversation, in Anthropic's form.",
        messages.AnswerMessage,
        MessageRequest,
        messages.Event,
        errors=COMPUTED,
        failure=messages.MessageErrorBody,
    ),
    Operation(
        "countMessageTokens",
        "POST",
        "/v1/messages/count_tokens",
        "Counts the tokens of a conversation, in Anthropic's form.",
        messages.TokenCount,
        CountTokensRequest,
        errors=BODY,
        failure=messages.MessageErrorBody,
    ),
    Operation(
        "retrieveResponse",
        "GET",
        "/v1/responses/{response_id}",
        "Returns a response that is stored or being created in the background.",
        Response,
        event=AnyEvent,
        errors=(*KEYED, ResponseNotFound),
        query=RetrieveQuery,
    ),
    Operation(
        "cancelResponse",
        "POST",
        "/v1/responses/{response_id}/cancel",
        "Cancels a response in the background.",
        Response,
        errors=(*KEYED, ResponseNotFound),
    ),
    Operation(
        "deleteResponse",
        "DELETE",
        "/v1/responses/{response_id}",
        "Deletes a stored response.",
        DeletedResponse,
        errors=(*KEYED, ResponseNotFound),
    ),
    Operation(
        "listResponseItems",
        "GET",
        "/v1/responses/{response_id}/input_items",
        "Lists the input items of a stored response.",
        ItemList,
        query=ItemsQuery,
        errors=(*KEYED, ResponseNotFound),
    ),
    Operation(
        "createCompletion",
        "POST",
        "/v1/completions",
        "Continues prompts, given as text or token ids.",
        reply.Reply[reply.TextChoice],
        CompletionRequest,
        reply.Reply[reply.TextChoice],
        has_done=True,
        errors=STREAMED,
    ),
    Operation(
        "generateTokens",
        "POST",
        "/inference/v1/generate",
        "Continues a prompt of token ids, and returns token ids.",
        TokenReply,
        TokenRequest,
        TokenReply,
        has_done=True,
        errors=COMPUTED,
    ),
    Operation(
        "createEmbedding",
        "POST",
        "/v1/embeddings",
        "Computes the vectors of inputs, given as text or token ids.",
        EmbeddingList[EmbeddingObject],
        EmbeddingsBody,
        errors=COMPUTED,
    ),
    *(
        Operation(name, "POST", path, "Computes the similarity of text pairs.", ScoreList, ScoreBody, errors=COMPUTED)
        for name, path in (("createScore", "/v1/score"), ("createScoreShort", "/score"))
    ),
    *(
        Operation(name, "POST", path, "Orders documents by relevance.", Ranking, RerankBody, errors=COMPUTED)
        for name, path in (("createRerank", "/v1/rerank"), ("createRerankShort", "/rerank"))
    ),
    Operation(
        "tokenize",
        "POST",
        "/tokenize",
        "Returns the token ids of text or a conversation.",
        TokenIds,
        TokenizeBody,
        errors=BODY,
    ),
    Operation(
        "detokenize", "POST", "/detokenize", "Returns the text of token ids.", TokenText, DetokenizeBody, errors=BODY
    ),
    Operation(
        "createFile",
        "POST",
        "/v1/files",
        "Stores a file, the input of a batch.",
        FileObject,
        FileUpload,
        errors=(*KEPT, BodyTooSlow, BodyTooLarge, UnsupportedMedia),
        media="multipart/form-data",
    ),
    Operation("listFiles", "GET", "/v1/files", "Lists files.", FileList, query=FilesQuery, errors=(*KEPT, NoSuchFile)),
    Operation(
        "retrieveFile",
        "GET",
        "/v1/files/{file_id}",
        "Returns a file's size and times.",
        FileObject,
        errors=(*KEPT, NoSuchFile),
    ),
    Operation(
        "downloadFile",
        "GET",
        "/v1/files/{file_id}/content",
        "Returns the content of a file.",
        bytes,
        errors=(*KEPT, NoSuchFile),
        answer_media=OCTETS,
    ),
    Operation(
        "deleteFile",
        "DELETE",
        "/v1/files/{file_id}",
        "Deletes a file.",
        DeletedFile,
        errors=(*KEPT, NoSuchFile, WrongState),
    ),
    Operation(
        "createBatch",
        "POST",
        "/v1/batches",
        "Begins to answer the requests of a file.",
        BatchObject,
        BatchRequest,
        errors=(*KEPT, NoSuchFile, BodyTooSlow, BodyTooLarge, UnsupportedMedia),
    ),
    Operation(
        "listBatches",
        "GET",
        "/v1/batches",
        "Lists batches.",
        BatchList,
        query=BatchesQuery,
        errors=(*KEPT, NoSuchBatch),
    ),
    Operation(
        "retrieveBatch", "GET", "/v1/batches/{batch_id}", "Returns a batch.", BatchObject, errors=(*KEPT, NoSuchBatch)
    ),
    Operation(
        "cancelBatch",
        "POST",
        "/v1/batches/{batch_id}/cancel",
        "Cancels a batch.",
        BatchObject,
        errors=(*KEPT, NoSuchBatch, WrongState),
    ),
    Operation("listModels", "GET", "/v1/models", "Lists the model and its adapters.", reply.ModelList, errors=KEYED),
    Operation(
        "retrieveModel",
        "GET",
        "/v1/models/{model:path}",
        "Returns the model or an adapter.",
        reply.ModelObject,
        errors=(*KEYED, UnknownModel),
    ),
    Operation(
        "explainRequest",
        "GET",
        "/v1/requests/{request_id}",
        "Returns the routes and times of an ended request.",
        EndedRequest,
        errors=(*KEYED, NoSuchRoute),
    ),
    Operation("getHealth", "GET", "/health", "Answers while the process is alive.", Alive),
    Operation("ping", "GET", "/ping", "As /health, for routers and hosts that probe this path.", Alive),
    Operation("getVersion", "GET", "/version", "Returns the version of kvferry.", Version),
    Operation(
        "getReadiness",
        "GET",
        "/ready",
        "Returns whether a request would be served.",
        Ready,
        also={503: Ready},
    ),
    Operation("getDescription", "GET", "/openapi.json", "Returns this description.", dict[str, Any]),
    Operation(
        "getPage",
        "GET",
        "/",
        "Returns the chat page, for browsers.",
        str,
        errors=(*EDGE, NoSuchRoute),
        answer_media="text/html; charset=utf-8",
    ),
    Operation(
        "getPageFile",
        "GET",
        "/page/{file}",
        "Returns a file of the chat page.",
        bytes,
        errors=(*EDGE, NoSuchRoute),
        answer_media="*/*",
    ),
)
PAGE = frozenset({"getPage", "getPageFile"})
"""Operations that a gateway without the chat page does not have."""
