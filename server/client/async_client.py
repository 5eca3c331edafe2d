"""The client for asyncio: `from quill.client import AsyncClient`.

Knows: calls, retries. Does not know: terminals, which of several servers gets a call.

    async with AsyncClient("127.0.0.1:50051") as client:  # or "quill://10.0.0.1:1,10.0.0.2:1"
        async for chunk in client.stream("Once upon a time", max_new_tokens=50):
            print(chunk.text, end="", flush=True)
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, Unpack

from google.protobuf.message import Message

from quill.protos import generation_pb2 as pb
from quill.server.balancing_headers import prefix_key, write_prefix_hash
from quill.server.client.access import Access, Metadata
from quill.server.client.async_pool import AsyncEndpointPool
from quill.server.client.balancer import ServerState
from quill.server.client.errors import CallError
from quill.server.client.options import EmbedOptions
from quill.server.client.pool_state import PickedEndpoint
from quill.server.client.primitives import ASYNC_CALL_ERRORS, async_read
from quill.server.client.requests import (
    Options,
    Prompt,
    Texts,
    embed_request,
    fill_request,
    make_request,
    only,
    score_request,
    trace_metadata,
    with_seed,
)
from quill.server.client.retry import Attempts, ResumeFilter, Retries

_Result = TypeVar("_Result")
_Started = tuple[PickedEndpoint, Any, pb.GenerateChunk | None]


class AsyncClient:
    """Belongs to one event loop. Errors are CallErrors."""

    def __init__(
        self,
        address: str,
        retries: Retries | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        access: Access | None = None,
    ) -> None:
        self._access = access or Access()
        self._pool = AsyncEndpointPool(address, self._access)
        self._retries = retries or Retries()
        self._sleep = sleep

    @property
    def _metadata(self) -> Metadata:
        return self._access.metadata + trace_metadata()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels the calls that are running."""
        await self._pool.close()

    def servers(self) -> tuple[ServerState, ...]:
        """The servers behind the address, and how many calls this client made to each."""
        return self._pool.servers()

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> pb.GenerateResponse:
        """The whole response at once."""
        return await self.generate_request(make_request(prompt, options), timeout_s)

    async def generate_request(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> pb.GenerateResponse:
        """Sets the request's seed if it has none."""
        with_seed(request)
        key = prefix_key(request)

        async def call(endpoint: PickedEndpoint, left_s: float | None) -> pb.GenerateResponse:
            headers = self._metadata + endpoint.headers + write_prefix_hash(key)
            responses = endpoint.stub.Generate(request, timeout=left_s, metadata=headers)
            try:
                endpoint.read_load(await responses.initial_metadata())
                response: pb.GenerateResponse = only([each async for each in responses])
            finally:
                responses.cancel()
            endpoint.end()
            endpoint.read_load(await responses.trailing_metadata())
            return response

        return await self._retry(call, key, Attempts(self._retries, timeout_s), set())

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        resume: bool = False,
        **options: Unpack[Options],
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """The response as it is generated. Closing the iterator cancels the request on the server.

        With `resume`, a stream that breaks is requested again with the same seed, here or from
        another server, and continues after the tokens that were received.
        """
        return self.stream_request(make_request(prompt, options), timeout_s, resume)

    async def stream_request(
        self, request: pb.GenerateRequest, timeout_s: float | None = None, resume: bool = False
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """Sets the request's seed if it has none."""
        with_seed(request)
        attempts, received = Attempts(self._retries, timeout_s), ResumeFilter()
        failed: set[str] = set()
        while True:
            try:
                stream = self._stream_once(request, attempts, failed)
                async with contextlib.aclosing(stream) as chunks:
                    async for chunk in chunks:
                        new = received.filter(chunk) if resume else chunk
                        if new is not None:
                            attempts.note_progress()
                            yield new
                return
            except CallError as error:
                if not resume:
                    raise
                await self._wait(error, attempts, failed)
            received.restart()

    async def _stream_once(
        self, request: pb.GenerateRequest, attempts: Attempts, failed: set[str]
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """`failed`: servers on which the stream broke before. This one joins them if it breaks."""
        key = prefix_key(request)

        async def start(endpoint: PickedEndpoint, left_s: float | None) -> _Started:
            headers = self._metadata + endpoint.headers + write_prefix_hash(key)
            call = endpoint.stub.GenerateStream(request, timeout=left_s, metadata=headers)
            try:
                endpoint.read_load(await call.initial_metadata())
                return endpoint, call, await async_read(call)
            except BaseException:
                call.cancel()
                raise

        endpoint, call, chunk = await self._retry(start, key, attempts, failed)
        try:
            while chunk is not None:
                yield chunk
                chunk = await async_read(call)
            endpoint.end()
            endpoint.read_load(await call.trailing_metadata())
        except ASYNC_CALL_ERRORS as raised:
            failed.add(endpoint.address)
            raise endpoint.fail(raised) from raised
        finally:
            endpoint.end()
            call.cancel()

    async def score(
        self, text: str | Sequence[int], *, timeout_s: float | None = None
    ) -> pb.ScoreResponse:
        """The log probability of each token of a text."""
        response: pb.ScoreResponse = await self._call("Score", score_request(text), timeout_s)
        return response

    async def embed(
        self, inputs: Texts, *, timeout_s: float | None = None, **options: Unpack[EmbedOptions]
    ) -> pb.EmbedResponse:
        """An embedding for each text, in `embeddings`."""
        return await self.embed_request(embed_request(inputs, options), timeout_s)

    async def embed_request(
        self, request: pb.EmbedRequest, timeout_s: float | None = None
    ) -> pb.EmbedResponse:
        response: pb.EmbedResponse = await self._call("Embed", request, timeout_s)
        return response

    async def fill_mask(
        self,
        text: str | Sequence[int],
        *,
        top_k: int | None = None,
        timeout_s: float | None = None,
    ) -> pb.FillMaskResponse:
        """The most likely tokens for each mask token of a text."""
        request = fill_request(text, top_k)
        response: pb.FillMaskResponse = await self._call("FillMask", request, timeout_s)
        return response

    async def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        response = await self._call("Tokenize", pb.TokenizeRequest(text=text), timeout_s)
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids)
        response: pb.DetokenizeResponse = await self._call("Detokenize", request, timeout_s)
        return response.text

    async def model(self, *, timeout_s: float | None = None) -> pb.Model:
        model: pb.Model = await self._call("GetModel", pb.GetModelRequest(), timeout_s)
        return model

    async def _call(self, method: str, request: Message, timeout_s: float | None) -> Any:
        async def call(endpoint: PickedEndpoint, left_s: float | None) -> Any:
            method_of_stub = getattr(endpoint.stub, method)
            response = await method_of_stub(request, timeout=left_s, metadata=self._metadata)
            endpoint.end()
            return response

        return await self._retry(call, None, Attempts(self._retries, timeout_s), set())

    async def _retry(
        self,
        call: Callable[[PickedEndpoint, float | None], Awaitable[_Result]],
        key: bytes | None,
        attempts: Attempts,
        failed: set[str],
    ) -> _Result:
        """Calls until it succeeds or a retry is of no use. `failed`: servers to avoid."""
        while True:
            try:
                return await self._attempt(call, key, attempts, failed)
            except CallError as error:
                await self._wait(error, attempts, failed)

    async def _attempt(
        self,
        call: Callable[[PickedEndpoint, float | None], Awaitable[_Result]],
        key: bytes | None,
        attempts: Attempts,
        failed: set[str],
    ) -> _Result:
        endpoint = await self._pool.pick(key, failed, attempts.left_s)
        try:
            result = await call(endpoint, attempts.left_s)
        except ASYNC_CALL_ERRORS as raised:
            failed.add(endpoint.address)
            raise endpoint.fail(raised) from raised
        except BaseException:
            endpoint.end()
            raise
        self._pool.was_reached = True
        return result

    async def _wait(self, error: CallError, attempts: Attempts, failed: set[str]) -> None:
        """For the next attempt. Raises the error if there is none."""
        delay_s = attempts.delay_s(
            error, has_other=self._pool.has_other(failed), was_reached=self._pool.was_reached
        )
        if delay_s is None:
            raise error
        await self._sleep(delay_s)
