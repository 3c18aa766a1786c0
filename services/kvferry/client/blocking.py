"""Client for programs without an event loop."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import TracebackType
from typing import Self

import grpc

from kvferry.client import messages
from kvferry.client.client_tls import ClientTls
from kvferry.client.messages import ChatMessage, Completion, ModelInfo, Prompt
from kvferry.client.responses import Embedding, chunk_from_wire, embeddings_from_wire
from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.chunks import TextChunk
from kvferry.core.inference.pooling import PoolingParams, pooling_named
from kvferry.core.inference.tool_inputs import ToolInput
from kvferry.core.inference.tools import Tool
from kvferry.core.retention import NO_HINTS, CacheHints
from kvferry.core.sampling import SamplingParams
from kvferry.rpc.channel import open_blocking_channel
from kvferry.rpc.errors import error_from_rpc
from kvferry.v1 import inference_pb2, inference_pb2_grpc


class Client:
    """Blocking client of a gateway. Thread-safe.

    Example:
        with Client("127.0.0.1:9000") as client:
            for chunk in client.generate([{"role": "user", "content": "Hello"}]):
                print(chunk.text, end="")
    """

    def __init__(
        self, address: str, *, api_key: str | None = None, timeout: float | None = None, tls: ClientTls | None = None
    ) -> None:
        """
        Args:
            address: `host:port` of a gateway's gRPC server.
            api_key: sent with every call; `None` if the gateway requires no key.
            timeout: default timeout of a call in seconds; `None` for no limit.
            tls: TLS to the gateway; `None` for a plain connection.

        Raises:
            UsageError: the files of `tls` cannot be read.
        """
        self._channel = open_blocking_channel(address, credentials=None if tls is None else tls.credentials())
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = messages.metadata(api_key)
        self._timeout = timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        n: int = 1,
        model: str = "",
        request_id: str = "",
        timeout: float | None = None,
        tools: Sequence[Tool | ToolInput] = (),
        tool_choice: str | Mapping[str, object] = "auto",
        parallel_tool_calls: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        beams: BeamParams | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        hints: CacheHints = NO_HINTS,
        max_reasoning_tokens: int | None = None,
    ) -> Generator[TextChunk, None, None]:
        """Stream text and tokens as they are generated; closing the generator stops the generation.

        Args:
            prompt: text, token ids or a conversation.
            sampling: sampling parameters; `None` selects the defaults of `SamplingParams`.
            n: number of samples; their chunks are interleaved, `TextChunk.index` identifies the sample.
            model: name of the model; empty selects the served model.
            request_id: request id for logs; if empty, the gateway generates one.
            timeout: time limit of the whole stream in seconds; `None` selects the client's default.
            tools: tools that the model may call.
            tool_choice: `auto`, `none`, `required`, or the name of the tool to call.
            parallel_tool_calls: whether an answer may have several calls.
            priority: priority of the request, used if workers schedule by priority; lower numbers come first.
            cache_salt: requests with unequal salts share no KV; empty for the tenant's cache.
            beams: parameters of a beam search, whose best `n` outputs are returned instead of samples.
            chat_template_kwargs: further variables of the chat template, such as `enable_thinking`.
            hints: what to ask of the cache; `Timing.retention` has what was granted.
            max_reasoning_tokens: maximum number of tokens of the reasoning, which then ends; `None` for no limit.

        Raises:
            KvferryError: the error that the gateway raised, as the same subclass.
        """
        use = messages.tool_use(tools, tool_choice, is_parallel=parallel_tool_calls)
        request = messages.generate_request(
            prompt,
            sampling,
            n,
            model,
            request_id,
            use,
            priority,
            cache_salt,
            beams,
            chat_template_kwargs,
            hints,
            max_reasoning_tokens,
        )
        limit = self._timeout if timeout is None else timeout
        call = self._stub.Generate(request, timeout=limit, metadata=self._metadata)
        try:
            with _own_errors():
                for response in call:
                    yield chunk_from_wire(response)
        finally:
            call.cancel()

    def complete(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        n: int = 1,
        model: str = "",
        request_id: str = "",
        timeout: float | None = None,
        tools: Sequence[Tool | ToolInput] = (),
        tool_choice: str | Mapping[str, object] = "auto",
        parallel_tool_calls: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        beams: BeamParams | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        hints: CacheHints = NO_HINTS,
        max_reasoning_tokens: int | None = None,
    ) -> list[Completion]:
        """Generate `n` samples and return them when complete; same arguments and errors as `generate`.

        Example:
            (answer,) = client.complete("The capital of France is", SamplingParams(max_tokens=8))
        """
        stream = self.generate(
            prompt,
            sampling,
            n=n,
            model=model,
            request_id=request_id,
            timeout=timeout,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            priority=priority,
            cache_salt=cache_salt,
            beams=beams,
            chat_template_kwargs=chat_template_kwargs,
            hints=hints,
            max_reasoning_tokens=max_reasoning_tokens,
        )
        with closing(stream) as chunks:
            return messages.gather(chunks)

    def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        pooling: str = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        model: str = "",
        request_id: str = "",
        timeout: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[Embedding]:
        """Compute a vector for each input, in order.

        Args:
            inputs: 1 to 1024 inputs, each a string or a list of token ids.
            pooling: `last`, `mean` or `cls`; see `core.inference.pooling.Pooling`.
            normalize: whether vectors have an L2 norm of 1.
            dimensions: number of leading values to keep, before a vector is normalized; `None` for all.
            model: name of the model; empty selects the served model.
            request_id: request id for logs; if empty, the gateway generates one.
            timeout: time limit of the call in seconds; `None` selects the client's default.
            priority: priority of the request, used if workers schedule by priority; lower numbers come first.
            cache_salt: requests with unequal salts share no KV; empty for the tenant's cache.

        Raises:
            KvferryError: the error that the gateway raised, as the same subclass.
        """
        params = PoolingParams(pooling_named(pooling), normalize, dimensions)
        request = messages.embed_request(inputs, params, model, request_id, priority, cache_salt)
        limit = self._timeout if timeout is None else timeout
        with _own_errors():
            return embeddings_from_wire(self._stub.Embed(request, timeout=limit, metadata=self._metadata))

    def tokenize(self, prompt: str | Sequence[ChatMessage], *, model: str = "") -> list[int]:
        """Return the token ids of text, or of a conversation rendered by the chat template.

        Raises:
            KvferryError: the gateway's error; see `generate`.
        """
        request = messages.tokenize_request(prompt, model)
        with _own_errors():
            return list(self._stub.Tokenize(request, timeout=self._timeout, metadata=self._metadata).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """Convert token ids to text.

        Raises:
            KvferryError: the gateway's error; see `generate`.
        """
        request = inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        with _own_errors():
            return self._stub.Detokenize(request, timeout=self._timeout, metadata=self._metadata).text

    def model_info(self, model: str = "") -> ModelInfo:
        """Return the served model's name, digest, context length and vocabulary.

        Raises:
            KvferryError: the gateway's error; see `generate`.
        """
        request = inference_pb2.GetModelInfoRequest(model=model)
        with _own_errors():
            return messages.model_info(self._stub.GetModelInfo(request, timeout=self._timeout, metadata=self._metadata))


@contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error
