"""`quill serve` with concurrent streams: throughput, gaps, waiting short prompts, cancellation.

    python -m quill.loadtest.bench.backends.quill_streams '{"bundle": …, "options": […]}'

Knows: gRPC, asyncio, the clock. Does not know: bars, other backends.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np

from quill.loadtest.bench.backends.quill_server import QuillServer, main
from quill.loadtest.errors import BackendError
from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc

MAX_WAIT_S = 300.0
WARM_STEPS = 4
NUM_STEPS = 32
NUM_NEW = 4000  # of each stream: more than any measurement needs
NUM_CANCELS = 8
SHORT_PROMPT = 20
SETTLE_S = 0.3
GREEDY: Mapping[str, Any] = {"temperature": 0.0}
CHAT: Mapping[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}

_Result = TypeVar("_Result")


@dataclass
class Answer:
    """One answer, as it comes. Times are the clock's."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    times_s: list[float] = field(default_factory=list)  # of each chunk
    token_times_s: list[float] = field(default_factory=list)
    finish: int = pb.FINISH_REASON_UNSPECIFIED
    queue_ms: float = 0.0
    status: str = "OK"
    message: str = ""

    @property
    def key(self) -> tuple[list[int], int, str]:
        """What must be the same alone and batched."""
        return self.token_ids, self.finish, self.status

    def check(self) -> "Answer":
        if self.status != "OK":
            raise BackendError(f"an answer failed with {self.status}: {self.message}")
        return self


def gaps(times_s: list[float], begin_s: float = 0.0, end_s: float = math.inf) -> list[float]:
    """Between two chunks or tokens, of the gaps that end in this interval."""
    return [b - a for a, b in itertools.pairwise(times_s) if begin_s <= b <= end_s]


class Client:
    """Sends requests over one connection."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = pb_grpc.TextGenerationStub(channel)
        self._chunk_came = asyncio.Event()

    async def send(self, request: pb.GenerateRequest, answer: Answer | None = None) -> Answer:
        """`answer` is filled while chunks come."""
        answer = answer or Answer()
        try:
            async for chunk in self._stub.GenerateStream(request, timeout=MAX_WAIT_S):
                answer.times_s.append(time.perf_counter())
                answer.token_times_s += answer.times_s[-1:] * len(chunk.token_ids)
                answer.token_ids += chunk.token_ids
                answer.text += chunk.text
                answer.finish = chunk.finish_reason or answer.finish
                answer.queue_ms = chunk.timings.queue_ms or answer.queue_ms
                self._chunk_came.set()
        except grpc.aio.AioRpcError as error:
            answer.status, answer.message = error.code().name, error.details() or ""
        return answer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when a chunk has made the condition true."""
        async with asyncio.timeout(MAX_WAIT_S):
            while not condition():
                self._chunk_came.clear()
                await self._chunk_came.wait()


def run_client(address: str, measure: Callable[[Client], Awaitable[_Result]]) -> _Result:
    async def connected() -> _Result:
        async with grpc.aio.insecure_channel(address) as channel:
            return await measure(Client(channel))

    return asyncio.run(connected())


async def cancel(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Cancels the tasks, and with them their calls."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Streams:
    """So many concurrent streams of one prompt."""

    def __init__(
        self,
        client: Client,
        prompt: Sequence[int],
        num_streams: int,
        options: Mapping[str, Any] = GREEDY,
        num_new: int = NUM_NEW,
    ) -> None:
        self._client = client
        self._request = _request(prompt, num_new, options)
        self._num_streams = num_streams
        self._answers: list[Answer] = []
        self._tasks: list[asyncio.Task[Answer]] = []

    async def __aenter__(self) -> "Streams":
        for _ in range(self._num_streams):
            self._add()
        await self._client.until(lambda: all(each.token_ids for each in self._answers))
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel(self._tasks)

    def _add(self) -> None:
        self._answers.append(Answer())
        sent = self._client.send(self._request, self._answers[-1])
        self._tasks.append(asyncio.create_task(sent))

    async def wait_for_steps(self, num_steps: int) -> None:
        """Until the first stream has so many tokens more."""
        watched = self._answers[0].token_ids
        wanted = len(watched) + num_steps
        await self._client.until(lambda: len(watched) >= wanted)

    async def throughput(self, num_steps: int) -> tuple[int, float]:
        """Tokens of all streams together, and seconds, over so many steps."""
        times_s = self._answers[0].token_times_s
        begin_s, before = times_s[-1], self._num_tokens()
        await self.wait_for_steps(num_steps)
        return self._num_tokens() - before, times_s[-1] - begin_s

    def _num_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self._answers)

    def gaps(self, begin_s: float, end_s: float) -> list[float]:
        """Between tokens."""
        times_s = [each.token_times_s for each in self._answers]
        return [gap for each in times_s for gap in gaps(each, begin_s, end_s)]

    async def admitted(self, ids: Sequence[int]) -> float:
        """One more request that waits in the queue; when it left the queue, as the server says."""
        arrived_s = time.perf_counter()
        answer = await read_prompt(self._client, ids)
        self._add()
        return arrived_s + answer.queue_ms / 1000

    def cancel_one(self) -> None:
        """The oldest but the first, whose steps are counted."""
        self._tasks.pop(1).cancel()
        self._answers.pop(1)


def _request(ids: Sequence[int], num_new: int, options: Mapping[str, Any]) -> pb.GenerateRequest:
    prompt = pb.TokenIds(ids=ids)
    return pb.GenerateRequest(prompt_ids=prompt, max_new_tokens=num_new, ignore_eos=True, **options)


async def read_prompt(client: Client, ids: Sequence[int]) -> Answer:
    """One request, until its prompt is read."""
    return (await client.send(_request(ids, 1, GREEDY))).check()


class QuillStreams(QuillServer):
    def decode(
        self, ids: Sequence[int], num_seqs: int, num_steps: int, sampling: str = "greedy"
    ) -> dict[str, Any]:
        """As the bare engine's decode, over gRPC."""
        options = GREEDY if sampling == "greedy" else CHAT

        async def measure(client: Client) -> tuple[int, float]:
            async with Streams(client, ids, num_seqs, options) as streams:
                await streams.wait_for_steps(WARM_STEPS)
                return await streams.throughput(num_steps)

        num_tokens, seconds = run_client(self.address, measure)
        return {"seconds": seconds, "num_tokens": num_tokens}

    def stall(self, ids: Sequence[int], long_ids: Sequence[int], num_seqs: int) -> dict[str, float]:
        """The 95th percentile of gaps while a long prompt is read, against before and after:
        meanwhile the streams have grown longer."""

        async def measure(client: Client) -> list[float]:
            async with Streams(client, ids, num_seqs) as streams:
                await streams.wait_for_steps(WARM_STEPS)
                times_s = [time.perf_counter()]
                for wait in (
                    streams.wait_for_steps(NUM_STEPS),
                    read_prompt(client, long_ids),
                    streams.wait_for_steps(NUM_STEPS),
                ):
                    await wait
                    times_s.append(time.perf_counter())
                spans = itertools.pairwise(times_s)
                return [float(np.percentile(streams.gaps(*span), 95)) for span in spans]

        before, during, after = run_client(self.address, measure)
        return {"value": 2 * during / (before + after)}

    def wait_beside(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Seconds to the first token of a short prompt that comes while long ones are read."""

        async def measure(client: Client) -> float:
            reading = [asyncio.create_task(read_prompt(client, each)) for each in prompts]
            await asyncio.sleep(SETTLE_S)
            begin_s = time.perf_counter()
            await read_prompt(client, prompts[0][-SHORT_PROMPT:])
            waited_s = time.perf_counter() - begin_s
            if any(task.done() for task in reading):
                raise BackendError("the long prompts were read too soon: raise --long-prompt")
            await cancel(reading)
            return waited_s

        return {"value": run_client(self.address, measure)}

    def cancel(self, ids: Sequence[int], num_seqs: int) -> dict[str, Any]:
        """Steps from a cancellation to the admission of the request that waits for it."""

        async def measure(client: Client) -> list[float]:
            async with Streams(client, ids, num_seqs) as streams:
                await streams.wait_for_steps(WARM_STEPS)
                return [await _steps_to_admission(streams, ids) for _ in range(NUM_CANCELS)]

        return {"values": run_client(self.address, measure)}


async def _steps_to_admission(streams: Streams, ids: Sequence[int]) -> float:
    waiting = asyncio.create_task(streams.admitted(ids))
    await streams.wait_for_steps(2)
    begin_s = time.perf_counter()
    streams.cancel_one()
    admitted_s = await waiting
    await streams.wait_for_steps(2)
    step_s = float(np.median(streams.gaps(begin_s - 1.0, time.perf_counter())))
    return (admitted_s - begin_s) / step_s


if __name__ == "__main__":
    main(QuillStreams)
