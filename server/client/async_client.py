"""The client of server/client/sync_client.py, for asyncio.

Knows: asyncio, channels. Does not know: terminals.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar, Unpack

import grpc

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.client.access import CHANNEL_OPTIONS, Access
from quill.server.client.call_error import CallError, read_error
from quill.server.client.requests import (
    EmbedOptions,
    Options,
    Prompt,
    Texts,
    embed_request,
    fill_request,
    make_request,
    score_request,
    seeded,
)
from quill.server.client.resume import ResumeFilter
from quill.server.client.retry import Attempts, Retries
from quill.server.client.trace_context import trace_metadata

_Request = TypeVar("_Request")
_Result = TypeVar("_Result")


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
        self._channel = _open(address, self._access)
        self._stub = pb_grpc.TextGenerationStub(self._channel)
        self._retries = retries or Retries()
        self._sleep = sleep

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Who calls, and within which trace."""
        return self._access.metadata + trace_metadata()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> pb.GenerateResponse:
        """The whole answer, at once."""
        return await self._call(self._stub.Generate, make_request(prompt, options), timeout_s)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        resume: bool = False,
        **options: Unpack[Options],
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """The answer as it is made. Closing the iterator ends the request on the server.

        With `resume`, a stream that breaks is asked for again with the same seed, and goes on
        where it broke, if the server comes back within the retries.
        """
        request = make_request(prompt, options)
        if not resume:
            return self._stream(request, timeout_s)
        return self._resumed(seeded(request), timeout_s)

    async def _resumed(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        attempts, given = Attempts(self._retries, timeout_s), ResumeFilter()
        while True:
            began = False
            try:
                stream = self._stream(request, attempts.left_s)
                async with contextlib.aclosing(stream) as chunks:
                    async for chunk in chunks:
                        began, new = True, given.take(chunk)
                        if new is not None:
                            yield new
                return
            except CallError as error:
                # Before its first chunk a call has been tried often enough.
                if not began or attempts.delay_s(error, warn=False) is None:
                    raise
            given.replay()

    async def _stream(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        async def begin(left_s: float | None) -> "_Begun":
            chunks = self._stub.GenerateStream(request, timeout=left_s, metadata=self._metadata)
            return chunks, await _next(chunks)

        call, chunk = await self._try(begin, timeout_s)
        try:
            while chunk is not None:
                yield chunk
                chunk = await _next(call)
        except grpc.aio.AioRpcError as error:
            raise read_error(error, self._access) from error
        finally:
            call.cancel()

    async def score(
        self, text: str | Sequence[int], *, timeout_s: float | None = None
    ) -> pb.ScoreResponse:
        """How likely the model finds a text."""
        return await self._call(self._stub.Score, score_request(text), timeout_s)

    async def embed(
        self, inputs: Texts, *, timeout_s: float | None = None, **options: Unpack[EmbedOptions]
    ) -> pb.EmbedResponse:
        """A vector for each text, in `embeddings`."""
        return await self._call(self._stub.Embed, embed_request(inputs, options), timeout_s)

    async def fill_mask(
        self,
        text: str | Sequence[int],
        *,
        top_k: int | None = None,
        timeout_s: float | None = None,
    ) -> pb.FillMaskResponse:
        """What could stand where a text has the mask token."""
        return await self._call(self._stub.FillMask, fill_request(text, top_k), timeout_s)

    async def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        request = pb.TokenizeRequest(text=text)
        return list((await self._call(self._stub.Tokenize, request, timeout_s)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids)
        return (await self._call(self._stub.Detokenize, request, timeout_s)).text

    async def model(self, *, timeout_s: float | None = None) -> pb.Model:
        return await self._call(self._stub.GetModel, pb.GetModelRequest(), timeout_s)

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Result],
        request: _Request,
        timeout_s: float | None,
    ) -> _Result:
        async def call(left_s: float | None) -> _Result:
            return await method(request, timeout=left_s, metadata=self._metadata)

        return await self._try(call, timeout_s)

    async def _try(
        self, call: Callable[[float | None], Awaitable[_Result]], timeout_s: float | None
    ) -> _Result:
        """Until it succeeds, or there is no use in trying again."""
        attempts = Attempts(self._retries, timeout_s)
        while True:
            try:
                return await call(attempts.left_s)
            except grpc.aio.AioRpcError as raised:
                error = read_error(raised, self._access)
                delay_s = attempts.delay_s(error)
                if delay_s is None:
                    raise error from raised
            await self._sleep(delay_s)


_Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateChunk]
_Begun = tuple[_Call, pb.GenerateChunk | None]


def _open(address: str, access: Access) -> grpc.aio.Channel:
    credentials = access.credentials(address)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


async def _next(call: _Call) -> pb.GenerateChunk | None:
    """None: there are no more."""
    chunk = await call.read()
    return chunk if isinstance(chunk, pb.GenerateChunk) else None
