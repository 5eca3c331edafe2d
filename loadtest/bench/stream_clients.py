"""Streams that run side by side, and when each of their tokens came.

Knows: the wire, asyncio, the clock. Does not know: what the times are for.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc

MAX_WAIT_S = 120.0

_Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateChunk]


class StreamClients:
    """So many streams, from the first's start to the last one's cancellation."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        prompt: Sequence[int],
        num_streams: int,
        options: Mapping[str, Any],
        num_new: int,
    ) -> None:
        self._stub = pb_grpc.TextGenerationStub(channel)
        self._prompt = prompt
        self._num_streams = num_streams
        self._options = options
        self._num_new = num_new  # of each stream: more than anybody waits for
        self._calls: list[_Call] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._times_s: list[list[float]] = []  # of each stream's tokens
        self._came = asyncio.Event()

    async def __aenter__(self) -> "StreamClients":
        for _ in range(self._num_streams):
            self._follow(self._call(self._prompt, self._num_new))
        while not all(self._times_s):
            await self._next_token()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._tasks)

    def _call(self, ids: Sequence[int], num_new: int) -> _Call:
        request = pb.GenerateRequest(
            prompt_ids=pb.TokenIds(ids=ids),
            max_new_tokens=num_new,
            ignore_eos=True,
            **self._options,
        )
        return self._stub.GenerateStream(request, timeout=MAX_WAIT_S)

    def _follow(self, call: _Call) -> None:
        times_s: list[float] = []
        self._calls.append(call)
        self._times_s.append(times_s)
        self._tasks.append(asyncio.create_task(self._read(call, times_s)))

    async def _read(self, call: _Call, times_s: list[float]) -> None:
        try:
            async for chunk in call:
                times_s += [time.perf_counter()] * len(chunk.token_ids)
                self._came.set()
        except asyncio.CancelledError:
            if not call.cancelled():
                raise

    async def _next_token(self) -> None:
        self._came.clear()
        async with asyncio.timeout(MAX_WAIT_S):
            await self._came.wait()

    async def wait_for_steps(self, num_steps: int) -> None:
        """Until a stream has so many tokens more."""
        watched = self._times_s[0]
        wanted = len(watched) + num_steps
        while len(watched) < wanted:
            await self._next_token()

    async def rate(self, num_steps: int) -> float:
        """Tokens a second of all streams together, over so many steps."""
        begin_s, before = self._times_s[0][-1], self._num_tokens()
        await self.wait_for_steps(num_steps)
        return (self._num_tokens() - before) / (self._times_s[0][-1] - begin_s)

    def _num_tokens(self) -> int:
        return sum(len(times_s) for times_s in self._times_s)

    def gaps(self, begin_s: float, end_s: float) -> list[float]:
        """Between two tokens of a stream, of those gaps that end in this time."""
        return [
            later - earlier
            for times_s in self._times_s
            for earlier, later in itertools.pairwise(times_s)
            if begin_s <= later <= end_s
        ]

    async def first_token(self, ids: Sequence[int]) -> None:
        """Somebody else's prompt, until it is read."""
        async for _ in self._call(ids, 1):
            pass

    async def started(self, ids: Sequence[int]) -> float:
        """Waits in the queue; joins the crowd. When it left the queue, by the server's word."""
        arrived_s = time.perf_counter()
        queue_ms = 0.0
        async for chunk in self._call(ids, 1):
            queue_ms = chunk.timings.queue_ms or queue_ms
        self._follow(self._call(self._prompt, self._num_new))
        return arrived_s + queue_ms / 1000

    def cancel_one(self) -> None:
        """The one that has run longest, but the first: that one is watched."""
        self._calls.pop(1).cancel()
        self._times_s.pop(1)
