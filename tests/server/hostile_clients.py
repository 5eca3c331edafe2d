"""Sends bad calls and bad bytes to a server, and judges what it makes of them.

Knows: gRPC's client, sockets. Does not know: what is sent, how the server was started.
"""

import asyncio
import contextlib
import random
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

HANGS_S = 300.0  # a machine may be slow; nothing here takes a second on an idle one
ANSWER_S = 0.05  # how long a connection listens before it goes
# What a call may come to. Anything else is a crash, a hang, or a bug.
FINE = frozenset(
    (
        *("OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"),
        "NOT_FOUND",  # a model by another name
    )
)
KNOWN = pb.GenerateRequest(
    prompt_ids=pb.TokenIds(ids=[5, 6, 7]), seed=3, max_new_tokens=8, temperature=1.0
)


class SiegeError(AssertionError):
    """The server did what it must not. Says for which input."""


class Besieger:
    """One server's enemy. Use it within one event loop."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.aio.insecure_channel(address)
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by kind of input, and answer

    async def close(self) -> None:
        await self._channel.close()

    async def known_answer(self) -> list[int]:
        """What the server says to a request that is in order: always the same."""
        stub = pb_grpc.TextGenerationStub(self._channel)
        answer = await stub.Generate(KNOWN, timeout=HANGS_S, wait_for_ready=True)
        return list(answer.sequences[0].token_ids)

    async def attack(self, seed: int, numbers: Sequence[int], share_of_bytes: float) -> None:
        """The inputs with these numbers, all at once."""
        chances = [random.Random(f"{seed}/{number}") for number in numbers]
        await asyncio.gather(
            *(
                self.send(f"input {number} of seed {seed}", chance, share_of_bytes)
                for number, chance in zip(numbers, chances, strict=True)
            )
        )

    async def send(self, name: str, chance: random.Random, share_of_bytes: float) -> None:
        if chance.random() < share_of_bytes:
            await self.send_bytes(make_bytes(chance))
        else:
            await self.call(make_call(chance), name)

    async def call(self, call: Call, name: str = "this call") -> None:
        try:
            await self.ask(call)
            outcome = "OK"
        except grpc.aio.AioRpcError as error:
            outcome = error.code().name
            if outcome not in FINE:
                shown = f"{call.method} {call.message[:200]!r}"
                raise SiegeError(f"{name}, {shown}: {outcome}: {error.details()}") from error
        self.outcomes[call.method, outcome] += 1

    async def ask(self, call: Call) -> None:
        channel: Any = self._channel  # messages are bytes here, which the stubs don't foresee
        path = path_of(call.method)
        if call.method == KSERVE_STREAMING:
            stream = channel.stream_stream(path)(iter([call.message]), timeout=HANGS_S)
            async for answer in stream:
                told = kserve.ModelStreamInferResponse.FromString(answer).error_message
                if told and told.partition(":")[0] not in FINE:
                    raise SiegeError(f"{call.message[:200]!r}: {told}")
        elif call.method == STREAMING:
            async for _ in channel.unary_stream(path)(call.message, timeout=HANGS_S):
                pass
        else:
            await channel.unary_unary(path)(call.message, timeout=HANGS_S)

    async def send_bytes(self, sent: Sent) -> None:
        """The server may answer or hang up. That it still serves others is asked elsewhere."""
        host, _, port = self._address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        answer = "no answer"
        try:
            writer.write(sent.content)
            await writer.drain()
            async with asyncio.timeout(ANSWER_S):
                while await reader.read(65_536):
                    answer = "answered"
            answer = "hung up"
        except TimeoutError:
            pass  # nobody need wait for the end of what it has to say
        except OSError:  # a server that hangs up while we write is within its rights
            answer = "hung up"
        if sent.rudely:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self.outcomes[f"bytes: {sent.kind}", answer] += 1
