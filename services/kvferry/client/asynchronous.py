"""The client for asyncio programs."""

from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar

import grpc

from kvferry.client import messages
from kvferry.client.messages import Completion, ModelInfo, Prompt
from kvferry.core.sampling import SamplingParams
from kvferry.rpc.channel import open_channel
from kvferry.rpc.errors import error_from_rpc
from kvferry.rpc.text import TextChunk
from kvferry.rpc.text_wire import chunk_from_wire
from kvferry.v1 import inference_pb2, inference_pb2_grpc

T = TypeVar("T")


class AsyncClient:
    """Talks to one gateway. Several calls may run at once.

    Example:
        async with AsyncClient("127.0.0.1:9000") as client:
            async with aclosing(client.generate([{"role": "user", "content": "Hello"}])) as chunks:
                async for chunk in chunks:
                    print(chunk.text, end="")
    """

    def __init__(self, address: str, *, api_key: str | None = None, timeout: float | None = None) -> None:
        """
        Args:
            address: `host:port` of a gateway's gRPC side.
            api_key: sent with every call; `None`: the gateway asks for none.
            timeout: seconds that a call may take when it brings no timeout of its own; `None`: no limit.
        """
        self._channel = open_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = messages.metadata(api_key)
        self._timeout = timeout

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        await self._channel.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        n: int = 1,
        model: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> AsyncGenerator[TextChunk, None]:
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
            async for response in call:
                yield chunk_from_wire(response)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()

    async def complete(
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
            (answer,) = await client.complete("The capital of France is", SamplingParams(max_tokens=8))
        """
        stream = self.generate(prompt, sampling, n=n, model=model, request_id=request_id, timeout=timeout)
        async with aclosing(stream) as chunks:
            return messages.gather([chunk async for chunk in chunks])

    async def tokenize(self, prompt: str | Sequence[Mapping[str, str]], *, model: str = "") -> list[int]:
        """Token ids of a text, or of a conversation as the chat template renders it.

        Raises:
            KvferryError: see `generate`.
        """
        request = messages.tokenize_request(prompt, model)
        return list(
            (await self._ask(self._stub.Tokenize(request, timeout=self._timeout, metadata=self._metadata))).token_ids
        )

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """The text of token ids.

        Raises:
            KvferryError: see `generate`.
        """
        request = inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        answer = self._stub.Detokenize(request, timeout=self._timeout, metadata=self._metadata)
        return (await self._ask(answer)).text

    async def model_info(self, model: str = "") -> ModelInfo:
        """What is served.

        Raises:
            KvferryError: see `generate`.
        """
        request = inference_pb2.GetModelInfoRequest(model=model)
        return messages.model_info(
            await self._ask(self._stub.GetModelInfo(request, timeout=self._timeout, metadata=self._metadata))
        )

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
