"""Sends bad calls, bad bytes and bad HTTP to a server, and judges its replies.

Knows: gRPC's client, sockets, statuses. Does not know: what is sent, how the server was started.
"""

import asyncio
import contextlib
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.protos import kserve_pb2 as kserve
from tests.server.bad_bytes import Sent, make_bytes
from tests.server.bad_calls import KSERVE_STREAMING, STREAMING, Call, make_call, path_of
from tests.server.bad_http import make_http

HANGS_S = 300.0  # a machine may be slow; nothing here takes a second on an idle one
READ_S = 0.05  # how long a connection reads before it closes
# What a call may end with. Anything else is a crash, a hang, or a bug.
FINE = frozenset(
    (
        *("OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"),
        "NOT_FOUND",  # a model by another name
    )
)
KNOWN = pb.GenerateRequest(
    prompt_ids=pb.TokenIds(ids=[5, 6, 7]), seed=3, max_new_tokens=8, temperature=1.0
)
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
_WHOLE = ("HTTP: JSON that is nearly right", "HTTP: any JSON")


class ServerFaultError(AssertionError):
    """The server did what it must not. Names the input."""


class Adversary:
    """One server's, within one event loop. Counts `outcomes` by kind of input, and reply."""

    def __init__(self, address: str, http_port: int = 0) -> None:
        self._address = address
        self._http_port = http_port
        self._channel = grpc.aio.insecure_channel(address)
        self.outcomes: Counter[tuple[str, str]] = Counter()

    async def close(self) -> None:
        await self._channel.close()

    async def known_answer(self) -> list[int]:
        """The tokens of a valid request: always the same."""
        stub = pb_grpc.TextGenerationStub(self._channel)
        answer = await stub.Generate(KNOWN, timeout=HANGS_S, wait_for_ready=True)
        return list(answer.sequences[0].token_ids)

    async def attack(self, seed: int, numbers: Sequence[int], share_of_bytes: float) -> None:
        """The inputs with these numbers, all at once."""
        await asyncio.gather(*(self._send(seed, number, share_of_bytes) for number in numbers))

    async def attack_http(self, seed: int, numbers: Sequence[int]) -> None:
        made = [(number, make_http(random.Random(f"http/{seed}/{number}"))) for number in numbers]
        await asyncio.gather(*(self._send_http(sent, f"{n} of {seed}") for n, sent in made))

    async def _send(self, seed: int, number: int, share_of_bytes: float) -> None:
        chance = random.Random(f"{seed}/{number}")
        if chance.random() < share_of_bytes:
            await self.send_bytes(make_bytes(chance))
        else:
            await self.call(make_call(chance), f"input {number} of seed {seed}")

    async def call(self, call: Call, name: str = "this call") -> None:
        try:
            await self.call_once(call)
            outcome = "OK"
        except grpc.aio.AioRpcError as error:
            outcome = error.code().name
            if outcome not in FINE:
                shown = f"{call.method} {call.message[:200]!r}"
                raise ServerFaultError(f"{name}, {shown}: {outcome}: {error.details()}") from error
        self.outcomes[call.method, outcome] += 1

    async def call_once(self, call: Call) -> None:
        channel: Any = self._channel  # messages are bytes here, which the stubs don't foresee
        path = path_of(call.method)
        if call.method == KSERVE_STREAMING:
            stream = channel.stream_stream(path)(iter([call.message]), timeout=HANGS_S)
            async for answer in stream:
                message = kserve.ModelStreamInferResponse.FromString(answer).error_message
                if message and message.partition(":")[0] not in FINE:
                    raise ServerFaultError(f"{call.message[:200]!r}: {message}")
        elif call.method == STREAMING:
            async for _ in channel.unary_stream(path)(call.message, timeout=HANGS_S):
                pass
        else:
            await channel.unary_unary(path)(call.message, timeout=HANGS_S)

    async def send_bytes(self, sent: Sent) -> None:
        """The server may reply or hang up; other calls show that it still serves."""
        reply, has_ended = await _exchange(int(self._address.rpartition(":")[2]), sent, READ_S)
        outcome = "hung up" if has_ended else "answered" if reply else "no answer"
        self.outcomes[f"bytes: {sent.kind}", outcome] += 1

    async def _send_http(self, sent: Sent, name: str) -> None:
        """A whole request gets one reply, whatever it contains. Others get one or don't."""
        is_whole = sent.kind in _WHOLE
        limit_s = HANGS_S if is_whole else READ_S
        reply, has_ended = await _exchange(self._http_port, sent, limit_s)
        if is_whole and not has_ended:
            raise ServerFaultError(f"{name} hangs: {sent.content[:500]!r}")
        statuses = [status.decode() for status in _STATUS.findall(reply)]
        if "500" in statuses or b'"type":"server_error"' in reply:
            raise ServerFaultError(f"{name}, {sent.content[:500]!r}: {reply[:2000]!r}")
        if is_whole and len(statuses) != 1:
            raise ServerFaultError(f"{name}, {sent.content[:500]!r}: {len(statuses)} replies")
        self.outcomes[sent.kind, statuses[0] if statuses else "no answer"] += 1


async def _exchange(port: int, sent: Sent, limit_s: float) -> tuple[bytes, bool]:
    """What the server replies, and whether it ended the connection within the time limit."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reply, has_ended = b"", True
    try:
        writer.write(sent.content)
        await writer.drain()
        async with asyncio.timeout(limit_s):
            while piece := await reader.read(65_536):
                reply += piece
    except TimeoutError:
        has_ended = False
    except OSError:
        pass  # a server may hang up while we write
    if sent.rudely:  # with a reset
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return reply, has_ended
