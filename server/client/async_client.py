"""The client of server/client/sync_client.py, for asyncio.

Knows: asyncio, calls. Does not know: terminals, which of several servers is asked.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, Unpack

import grpc

from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access
from quill.server.client.async_fleet import AsyncFleet
from quill.server.client.balancing.balancer import ServerState
from quill.server.client.balancing.beginning import beginning
from quill.server.client.call_error import CallError, read_error
from quill.server.client.fleet_state import Lease, closed
from quill.server.client.requests import (
    EmbedOptions,
    Options,
    Prompt,
    Texts,
    embed_request,
    fill_request,
    make_request,
    only,
    score_request,
    seeded,
)
from quill.server.client.resume import ResumeFilter
from quill.server.client.retry import Attempts, Retries
from quill.server.client.trace_context import trace_metadata
from quill.server.prefix_header import write_prefix_hash

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
        self._fleet = AsyncFleet(address, self._access)
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
        await self._fleet.close()

    def servers(self) -> tuple[ServerState, ...]:
        """Those behind the address, and what this client has asked of each."""
        return self._fleet.servers()

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> pb.GenerateResponse:
        """The whole answer, at once."""
        request = seeded(make_request(prompt, options))
        key = beginning(request)

        async def call(server: Lease, left_s: float | None) -> pb.GenerateResponse:
            headers = self._metadata + server.headers + write_prefix_hash(key)
            answers = server.stub.Generate(request, timeout=left_s, metadata=headers)
            try:
                server.hear(await answers.initial_metadata())
                answer: pb.GenerateResponse = only([each async for each in answers])
            finally:
                answers.cancel()
            server.end()
            server.hear(await answers.trailing_metadata())
            return answer

        return await self._try(call, key, timeout_s, set())

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
        request = seeded(make_request(prompt, options))
        return (self._resumed if resume else self._stream)(request, timeout_s)

    async def _resumed(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        attempts, given = Attempts(self._retries, timeout_s), ResumeFilter()
        failed: set[str] = set()
        while True:
            began = False
            try:
                stream = self._stream(request, attempts.left_s, failed)
                async with contextlib.aclosing(stream) as chunks:
                    async for chunk in chunks:
                        began, new = True, given.take(chunk)
                        if new is not None:
                            yield new
                return
            except CallError as error:
                # Before its first chunk a call has been tried often enough.
                elsewhere = self._fleet.has_other(failed)
                delay_s = attempts.delay_s(error, warn=False, elsewhere=elsewhere)
                if not began or delay_s is None:
                    raise
            given.replay()

    async def _stream(
        self,
        request: pb.GenerateRequest,
        timeout_s: float | None,
        failed: set[str] | None = None,
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """`failed`: servers that broke it before; this one joins them if it does."""
        failed, key = set() if failed is None else failed, beginning(request)

        async def begin(server: Lease, left_s: float | None) -> "_Begun":
            headers = self._metadata + server.headers + write_prefix_hash(key)
            call = server.stub.GenerateStream(request, timeout=left_s, metadata=headers)
            try:
                server.hear(await call.initial_metadata())
                return server, call, await _next(call)
            except BaseException:
                call.cancel()
                raise

        server, call, chunk = await self._try(begin, key, timeout_s, failed)
        try:
            while chunk is not None:
                yield chunk
                chunk = await _next(call)
            server.end()
            server.hear(await call.trailing_metadata())
        except grpc.aio.AioRpcError as raised:
            failed.add(server.address)
            error = read_error(raised, self._access)
            server.end(error)
            raise error from raised
        except asyncio.CancelledError:
            self._check_open()
            raise
        finally:
            server.end()
            call.cancel()

    async def score(
        self, text: str | Sequence[int], *, timeout_s: float | None = None
    ) -> pb.ScoreResponse:
        """How likely the model finds a text."""
        return await self._call(lambda stub: stub.Score, score_request(text), timeout_s)

    async def embed(
        self, inputs: Texts, *, timeout_s: float | None = None, **options: Unpack[EmbedOptions]
    ) -> pb.EmbedResponse:
        """A vector for each text, in `embeddings`."""
        return await self._call(lambda stub: stub.Embed, embed_request(inputs, options), timeout_s)

    async def fill_mask(
        self,
        text: str | Sequence[int],
        *,
        top_k: int | None = None,
        timeout_s: float | None = None,
    ) -> pb.FillMaskResponse:
        """What could stand where a text has the mask token."""
        return await self._call(lambda stub: stub.FillMask, fill_request(text, top_k), timeout_s)

    async def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        request = pb.TokenizeRequest(text=text)
        return list((await self._call(lambda stub: stub.Tokenize, request, timeout_s)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids)
        answer: pb.DetokenizeResponse = await self._call(
            lambda stub: stub.Detokenize, request, timeout_s
        )
        return answer.text

    async def model(self, *, timeout_s: float | None = None) -> pb.Model:
        return await self._call(lambda stub: stub.GetModel, pb.GetModelRequest(), timeout_s)

    async def _call(
        self,
        method: Callable[[Any], grpc.aio.UnaryUnaryMultiCallable[_Request, _Result]],
        request: _Request,
        timeout_s: float | None,
    ) -> _Result:
        async def call(server: Lease, left_s: float | None) -> _Result:
            answer = await method(server.stub)(request, timeout=left_s, metadata=self._metadata)
            server.end()
            return answer

        return await self._try(call, None, timeout_s, set())

    async def _try(
        self,
        call: Callable[[Lease, float | None], Awaitable[_Result]],
        key: bytes | None,
        timeout_s: float | None,
        failed: set[str],
    ) -> _Result:
        """Until it succeeds, or there is no use in trying again. `failed`: servers to avoid."""
        attempts = Attempts(self._retries, timeout_s)
        while True:
            try:
                return await self._ask(call, key, attempts, failed)
            except CallError as error:
                elsewhere = self._fleet.has_other(failed)
                delay_s = attempts.delay_s(error, elsewhere=elsewhere)
                if delay_s is None:
                    raise
            await self._sleep(delay_s)

    async def _ask(
        self,
        call: Callable[[Lease, float | None], Awaitable[_Result]],
        key: bytes | None,
        attempts: Attempts,
        failed: set[str],
    ) -> _Result:
        server = await self._fleet.take(key, failed, attempts.left_s)
        try:
            return await call(server, attempts.left_s)
        except grpc.aio.AioRpcError as raised:
            failed.add(server.address)
            error = read_error(raised, self._access)
            server.end(error)
            raise error from raised
        except asyncio.CancelledError:
            server.end()
            self._check_open()
            raise
        except BaseException:
            server.end()
            raise

    def _check_open(self) -> None:
        """Where a call was cancelled. If that was because the client was closed, whoever waits for
        it isn't cancelled, and is told."""
        task = asyncio.current_task()
        if self._fleet.is_closed and not (task and task.cancelling()):
            raise closed() from None


_Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateChunk]
_Begun = tuple[Lease, _Call, pb.GenerateChunk | None]


async def _next(call: _Call) -> pb.GenerateChunk | None:
    """None: there are no more."""
    chunk = await call.read()
    return chunk if isinstance(chunk, pb.GenerateChunk) else None
