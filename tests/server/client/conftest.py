"""Both clients behind the blocking client's methods: each test of calls runs on both."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar, cast

import pytest

from quill.protos import generation_pb2 as pb
from quill.server.client.async_client import AsyncClient
from quill.server.client.balancer import ServerState
from quill.server.client.sync_client import Client

_Result = TypeVar("_Result")
MakeClient = type[Client]


class AsyncAdapter:
    """An AsyncClient on an event loop in a thread of its own."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, stack: ExitStack, *given: Any, **options: Any
    ) -> None:
        self._loop, self._stack = loop, stack
        if "sleep" in options:
            blocking = options["sleep"]
            options["sleep"] = lambda delay_s: asyncio.to_thread(blocking, delay_s)
        self._client = AsyncClient(*given, **options)
        stack.callback(self.close)

    def __enter__(self) -> "AsyncAdapter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return lambda *given, **options: self._run(method(*given, **options))

    def servers(self) -> tuple[ServerState, ...]:
        return self._client.servers()

    def stream(self, *given: Any, **options: Any) -> Generator[pb.GenerateChunk, None, None]:
        chunks = self._iterate(self._client.stream(*given, **options))
        self._stack.callback(chunks.close)
        return chunks

    def _iterate(self, chunks: Any) -> Generator[pb.GenerateChunk, None, None]:
        try:
            while (chunk := self._run(_next(chunks))) is not None:
                yield chunk
        finally:
            self._run(chunks.aclose())

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _next(chunks: Any) -> pb.GenerateChunk | None:
    return await anext(chunks, None)


@pytest.fixture(params=["sync", "async"])
def make_client(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    """The class of the blocking client, or what makes an async client that looks like one.

    What a failed test leaves open ends before the loop does: the garbage collector would find it
    in another test, and fail that.
    """
    if request.param == "sync":
        yield Client
        return
    with ExitStack() as stack:
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        thread = threading.Thread(target=loop.run_forever)
        stack.callback(thread.join)
        stack.callback(loop.call_soon_threadsafe, loop.stop)
        thread.start()
        made = stack.enter_context(ExitStack())
        yield cast(
            "MakeClient", lambda *given, **options: AsyncAdapter(loop, made, *given, **options)
        )
