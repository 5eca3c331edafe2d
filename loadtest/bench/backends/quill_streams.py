"""`quill serve` with concurrent streams: throughput, gaps, waiting short prompts, cancellation.

    python -m quill.loadtest.bench.backends.quill_streams '{"bundle": …, "options": […]}'

Knows: gRPC, asyncio, the clock. Does not know: bars, other backends.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc
import numpy as np

from quill.loadtest.bench.backends.quill_server import QuillServer, main
from quill.loadtest.errors import BackendError
from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc

MAX_WAIT_S = 120.0
WARM_STEPS = 4
NUM_STEPS = 32
NUM_NEW = 4000  # of each stream: more than any measurement needs
NUM_CANCELS = 8
SHORT_PROMPT = 20
SETTLE_S = 0.3
GREEDY: Mapping[str, Any] = {"temperature": 0.0}
CHAT: Mapping[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}

_Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateChunk]
_Result = TypeVar("_Result")


class Streams:
    """So many concurrent streams, and when each of their tokens came."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        prompt: Sequence[int] = (),
        num_streams: int = 0,
        options: Mapping[str, Any] = GREEDY,
        num_new: int = NUM_NEW,
    ) -> None:
        self._stub = pb_grpc.TextGenerationStub(channel)
        self._prompt = prompt
        self._num_streams = num_streams
        self._options = options
        self._num_new = num_new
        self._calls: list[_Call] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._times_s: list[list[float]] = []  # of each stream's tokens
        self._token_came = asyncio.Event()

    async def __aenter__(self) -> "Streams":
        for _ in range(self._num_streams):
            self._add(self._call(self._prompt, self._num_new))
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

    def _add(self, call: _Call) -> None:
        times_s: list[float] = []
        self._calls.append(call)
        self._times_s.append(times_s)
        self._tasks.append(asyncio.create_task(self._read(call, times_s)))

    async def _read(self, call: _Call, times_s: list[float]) -> None:
        try:
            async for chunk in call:
                times_s += [time.perf_counter()] * len(chunk.token_ids)
                self._token_came.set()
        except asyncio.CancelledError:
            if not call.cancelled():
                raise

    async def _next_token(self) -> None:
        self._token_came.clear()
        async with asyncio.timeout(MAX_WAIT_S):
            await self._token_came.wait()

    async def wait_for_steps(self, num_steps: int) -> None:
        """Until the first stream has so many tokens more."""
        watched = self._times_s[0]
        wanted = len(watched) + num_steps
        while len(watched) < wanted:
            await self._next_token()

    async def throughput(self, num_steps: int) -> tuple[int, float]:
        """Tokens of all streams together, and seconds, over so many steps."""
        begin_s, before = self._times_s[0][-1], self._num_tokens()
        await self.wait_for_steps(num_steps)
        return self._num_tokens() - before, self._times_s[0][-1] - begin_s

    def _num_tokens(self) -> int:
        return sum(len(times_s) for times_s in self._times_s)

    def gaps(self, begin_s: float, end_s: float) -> list[float]:
        """Between two tokens of a stream, of the gaps that end in this interval."""
        return [
            later - earlier
            for times_s in self._times_s
            for earlier, later in itertools.pairwise(times_s)
            if begin_s <= later <= end_s
        ]

    async def first_token(self, ids: Sequence[int]) -> None:
        """One more request, until its prompt is read."""
        async for _ in self._call(ids, 1):
            pass

    async def admitted(self, ids: Sequence[int]) -> float:
        """One more request that waits in the queue; when it left the queue, as the server says."""
        arrived_s, queue_ms = time.perf_counter(), 0.0
        async for chunk in self._call(ids, 1):
            queue_ms = chunk.timings.queue_ms or queue_ms
        self._add(self._call(self._prompt, self._num_new))
        return arrived_s + queue_ms / 1000

    def cancel_one(self) -> None:
        """The oldest but the first, whose steps are counted."""
        self._calls.pop(1).cancel()
        self._times_s.pop(1)


class QuillStreams(QuillServer):
    def decode(
        self, ids: Sequence[int], num_seqs: int, num_steps: int, sampling: str = "greedy"
    ) -> dict[str, Any]:
        """As the bare engine's decode, over gRPC."""
        options = GREEDY if sampling == "greedy" else CHAT

        async def measure(channel: grpc.aio.Channel) -> tuple[int, float]:
            async with Streams(channel, ids, num_seqs, options) as streams:
                await streams.wait_for_steps(WARM_STEPS)
                return await streams.throughput(num_steps)

        num_tokens, seconds = self._run(measure)
        return {"seconds": seconds, "num_tokens": num_tokens}

    def stall(self, ids: Sequence[int], long_ids: Sequence[int], num_seqs: int) -> dict[str, float]:
        """The 95th percentile of gaps while a long prompt is read, against before and after:
        meanwhile the streams have grown longer."""

        async def measure(channel: grpc.aio.Channel) -> list[float]:
            async with Streams(channel, ids, num_seqs) as streams:
                await streams.wait_for_steps(WARM_STEPS)
                times_s = [time.perf_counter()]
                for wait in (
                    streams.wait_for_steps(NUM_STEPS),
                    streams.first_token(long_ids),
                    streams.wait_for_steps(NUM_STEPS),
                ):
                    await wait
                    times_s.append(time.perf_counter())
                spans = itertools.pairwise(times_s)
                return [float(np.percentile(streams.gaps(*span), 95)) for span in spans]

        before, during, after = self._run(measure)
        return {"value": 2 * during / (before + after)}

    def wait_beside(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Seconds to the first token of a short prompt that comes while long ones are read."""

        async def measure(channel: grpc.aio.Channel) -> float:
            streams = Streams(channel)
            reading = [asyncio.create_task(streams.first_token(prompt)) for prompt in prompts]
            await asyncio.sleep(SETTLE_S)
            begin_s = time.perf_counter()
            await streams.first_token(prompts[0][-SHORT_PROMPT:])
            waited_s = time.perf_counter() - begin_s
            if any(task.done() for task in reading):
                raise BackendError("the long prompts were read too soon: raise --long-prompt")
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            return waited_s

        return {"value": self._run(measure)}

    def cancel(self, ids: Sequence[int], num_seqs: int) -> dict[str, Any]:
        """Steps from a cancellation to the admission of the request that waits for it."""

        async def measure(channel: grpc.aio.Channel) -> list[float]:
            async with Streams(channel, ids, num_seqs) as streams:
                await streams.wait_for_steps(WARM_STEPS)
                return [await self._steps_to_admission(streams, ids) for _ in range(NUM_CANCELS)]

        return {"values": self._run(measure)}

    async def _steps_to_admission(self, streams: Streams, ids: Sequence[int]) -> float:
        waiting = asyncio.create_task(streams.admitted(ids))
        await streams.wait_for_steps(2)
        begin_s = time.perf_counter()
        streams.cancel_one()
        admitted_s = await waiting
        await streams.wait_for_steps(2)
        step_s = float(np.median(streams.gaps(begin_s - 1.0, time.perf_counter())))
        return (admitted_s - begin_s) / step_s

    def _run(self, measure: Callable[[grpc.aio.Channel], Awaitable[_Result]]) -> _Result:
        async def connected() -> _Result:
            async with grpc.aio.insecure_channel(self.address) as channel:
                return await measure(channel)

        return asyncio.run(connected())


if __name__ == "__main__":
    main(QuillStreams)
