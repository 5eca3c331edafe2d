"""Measures how long a stream waits before the server accepts it, by a call of the server's own.

Knows: the server's own Unix socket, the queue of unaccepted streams. Does not know: ports, keys.

Calls that aren't accepted yet are gRPC's alone: no log and no metric has them. So the server calls
itself every second, through the same queue. While that call waits too long, health is NOT_SERVING.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any

import grpc

from quill.protos import generation_pb2 as pb
from quill.server.machine.private_folder import PrivateFolder

HEADER = "quill-probe"
SERVICE = pb.DESCRIPTOR.services_by_name["TextGeneration"].full_name
METHOD = f"/{SERVICE}/GenerateStream"
PERIOD_S = 1.0
MAX_UNACCEPTED_S = 5.0
# A call that was accepted is started, or rejected after 75% of this: it isn't what the probe looks
# for. One that isn't accepted expires after it.
TIMEOUT_S = 5.2
PROBLEM = "unread"


class AcceptProbe:
    """Belongs to the event loop. `on_health(problem, is_there)`."""

    def __init__(self, on_health: Callable[[str, bool], None]) -> None:
        self._on_health = on_health
        self.secret = secrets.token_hex(16)
        self._folder = PrivateFolder("quill-probe-")
        self._sent_s: float | None = None  # when the call under way began
        self._last_s = 0.0

    @property
    def address(self) -> str:
        return f"unix:{self._folder.path / 'probe'}"

    @property
    def age_s(self) -> float:
        """How long the newest probe has waited, or had to."""
        sent_s = self._sent_s
        return self._last_s if sent_s is None else max(self._last_s, time.monotonic() - sent_s)

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            async with grpc.aio.insecure_channel(self.address) as channel:
                while True:
                    await self._probe(channel)
                    await asyncio.sleep(PERIOD_S)
        finally:
            self._folder.remove()

    async def _probe(self, channel: grpc.aio.Channel) -> None:
        began_s = self._sent_s = time.monotonic()
        accepted = asyncio.ensure_future(self._call(channel))
        try:
            _, waiting = await asyncio.wait({accepted}, timeout=MAX_UNACCEPTED_S)
            if waiting:
                self._on_health(PROBLEM, True)
                await asyncio.wait(waiting)
        finally:
            accepted.cancel()
        self._last_s, self._sent_s = time.monotonic() - began_s, None
        self._on_health(PROBLEM, self._last_s > MAX_UNACCEPTED_S)

    async def _call(self, channel: grpc.aio.Channel) -> None:
        call: Any = channel.unary_stream(METHOD, pb.GenerateRequest.SerializeToString)
        sent: Any = {"metadata": ((HEADER, self.secret),), "timeout": TIMEOUT_S}
        with contextlib.suppress(grpc.aio.AioRpcError):  # it waited too long, or the server stops
            async for _ in call(pb.GenerateRequest(), **sent):
                pass


async def accept(_: object, context: object) -> None:
    """What a probe gets: it was accepted, and that is all."""
