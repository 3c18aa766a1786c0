"""The client for programs without an event loop."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import TracebackType
from typing import Self

import grpc

from kvferry.client import messages
from kvferry.client.messages import Completion, ModelInfo, Prompt
from kvferry.core.sampling import SamplingParams
from kvferry.rpc.channel import open_blocking_channel
from kvferry.rpc.errors import error_from_rpc
from kvferry.rpc.text import TextChunk
from kvferry.rpc.text_wire import chunk_from_wire
from kvferry.v1 import inference_pb2, inference_pb2_grpc


class Client:
    """Talks to one gateway. May be shared by threads.

    Example:
        with Client("127.0.0.1:9000") as client:
            for chunk in client.generate([{"role": "user", "content": "Hello"}]):
                print(chunk.text, end="")
    """

    def __init__(self, address: str, *, api_key: str | None = None, timeout: float | None = None) -> None:
        """
        Args:
            address: `host:port` of a gateway's gRPC side.
            api_key: sent with every call; `None`: the gateway asks for none.
            timeout: seconds that a call may take when it brings no timeout of its own; `None`: no limit.
        """
        self._channel = open_blocking_channel(address)
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
    ) -> Generator[TextChunk, None, None]:
        """Stream text and tokens as they come; leaving the generator stops the generation.

        Args:
            prompt: text, token ids or a conversation.
            sampling: `None`: the defaults of `SamplingParams`.
            n: samples of the one prompt; their chunks interleave, `TextChunk.index` tells them apart.
            model: empty: the one model served.
            request_id: empty: the gateway makes one.
            timeout: seconds for the whole stream; `None`: the client's own.

        Raises:
            KvferryError: whatever the gateway answered, as the class it had there.
        """
        request = messages.generate_request(prompt, sampling, n, model, request_id)
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
    ) -> list[Completion]:
        """The `n` whole samples; arguments and errors as of `generate`.

        Example:
            (answer,) = client.complete("The capital of France is", SamplingParams(max_tokens=8))
        """
        stream = self.generate(prompt, sampling, n=n, model=model, request_id=request_id, timeout=timeout)
        with closing(stream) as chunks:
            return messages.gather(chunks)

    def tokenize(self, prompt: str | Sequence[Mapping[str, str]], *, model: str = "") -> list[int]:
        """Token ids of a text, or of a conversation as the chat template renders it.

        Raises:
            KvferryError: see `generate`.
        """
        request = messages.tokenize_request(prompt, model)
        with _own_errors():
            return list(self._stub.Tokenize(request, timeout=self._timeout, metadata=self._metadata).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """The text of token ids.

        Raises:
            KvferryError: see `generate`.
        """
        request = inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        with _own_errors():
            return self._stub.Detokenize(request, timeout=self._timeout, metadata=self._metadata).text

    def model_info(self, model: str = "") -> ModelInfo:
        """What is served.

        Raises:
            KvferryError: see `generate`.
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
