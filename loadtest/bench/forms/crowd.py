"""Many who ask at once, and when each word of their answers came.

Knows: the wire, asyncio, the clock. Does not know: forms, what the times are for.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import grpc

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc

MAX_WAIT_S = 300.0


class Server:
    """One that is asked over one connection."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = pb_grpc.TextGenerationStub(channel)

    def stream(
        self, request: pb.GenerateRequest
    ) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateChunk]:
        return self._stub.GenerateStream(request, timeout=MAX_WAIT_S)


@dataclass
class Heard:
    """One answer. Times are of the clock."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    times_s: list[float] = field(default_factory=list)  # when each message came
    finish: int = pb.FINISH_REASON_UNSPECIFIED
    status: str = "OK"
    message: str = ""

    @property
    def is_whole(self) -> bool:
        """It ended by itself."""
        return self.finish == pb.FINISH_REASON_EOS

    def gaps(self, begin_s: float = 0.0, end_s: float = float("inf")) -> list[float]:
        """Between two messages, of those gaps that end in this time."""
        return [b - a for a, b in pairwise(self.times_s) if begin_s <= b <= end_s]


async def ask(server: Server, request: pb.GenerateRequest, heard: Heard | None = None) -> Heard:
    """`heard` is filled while it goes on."""
    heard = Heard() if heard is None else heard
    try:
        async for chunk in server.stream(request):
            heard.times_s.append(time.perf_counter())
            heard.token_ids += chunk.token_ids
            heard.text += chunk.text
            heard.finish = chunk.finish_reason or heard.finish
    except grpc.aio.AioRpcError as error:
        heard.status, heard.message = error.code().name, error.details() or ""
    return heard


async def ask_all(
    server: Server, requests: Sequence[pb.GenerateRequest], num_users: int
) -> list[Heard]:
    """Each user takes the next request as soon as it has its answer."""
    answers: list[Heard] = [Heard() for _ in requests]
    waiting = iter(zip(requests, answers, strict=True))

    async def user(mine: Iterable[tuple[pb.GenerateRequest, Heard]]) -> None:
        for request, heard in mine:
            await ask(server, request, heard)

    await asyncio.gather(*(user(waiting) for _ in range(num_users)))
    return answers


def as_free(request: pb.GenerateRequest, num_tokens: int) -> pb.GenerateRequest:
    """The same without its form, and as long as its answer was."""
    free = pb.GenerateRequest()
    free.CopyFrom(request)
    free.ClearField("constraint")
    free.ClearField("min_new_tokens")
    free.ignore_eos, free.max_new_tokens = True, num_tokens
    return free
