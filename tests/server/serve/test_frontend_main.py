"""A frontend's process, with a supervisor whose messages come at the worst moment."""

import asyncio
import os
import socket

import msgspec

from quill.server.loading.description import EngineInfo
from quill.server.process.control import (
    TO_SUPERVISOR,
    Engine,
    Load,
    Newer,
    Ready,
    Serving,
    ToSupervisor,
    control_frame,
)
from quill.server.process.frame_socket import FrameSocket
from quill.server.request import Limits
from quill.server.serve.frontend_main import serve
from quill.server.settings import Settings
from tests.server.scripted_session import TIMEOUT_S
from tests.server.tiny_bundle import TinyBundle

SETTINGS = Settings(port=0, http_port="off", metrics_port="off")


class ScriptedSupervisor:
    """Hands out engines without a process, and sends what a test wants."""

    def __init__(self, control: socket.socket, bundle: TinyBundle) -> None:
        self.frames = FrameSocket(control, self._receive, lambda: None)
        self._received: asyncio.Queue[ToSupervisor] = asyncio.Queue()
        info = EngineInfo(
            manifest=bundle.manifest,
            precision="fp32",
            limits=Limits(max_num_seqs=1, context=16, num_blocks=4),
            runtime_version="",
            takes_constraints=False,
        )
        self._ready = Ready(os.getpid(), msgspec.Raw(msgspec.msgpack.encode(info)))
        self._engines: list[socket.socket] = []

    def _receive(self, body: bytes) -> None:
        self._received.put_nowait(TO_SUPERVISOR.decode(body))

    async def next_of(self, kind: type[ToSupervisor]) -> ToSupervisor:
        async with asyncio.timeout(TIMEOUT_S):
            while not isinstance(message := await self._received.get(), kind):
                pass
        return message

    def hand_out(self, number: int) -> None:
        own, other = socket.socketpair()
        self._engines.append(own)
        self.frames.send_with(control_frame(Engine(number, self._ready)), other)

    def close(self) -> None:
        self.frames.close()
        for each in self._engines:
            each.close()


def test_a_frontend_follows_the_others_to_an_engine_that_was_newer_before_it_served(
    tiny_bundle: TinyBundle,
) -> None:
    async def test() -> None:
        own, control = socket.socketpair()
        serving = asyncio.ensure_future(serve(tiny_bundle.directory, SETTINGS, control, 0))
        supervisor = ScriptedSupervisor(own, tiny_bundle)
        try:
            assert await supervisor.next_of(Load) == Load(0)
            supervisor.hand_out(1)
            supervisor.frames.send(control_frame(Newer(2)))
            assert await supervisor.next_of(Load) == Load(1)
            supervisor.hand_out(2)
            while (await supervisor.next_of(Serving)).engine != 2:  # type: ignore[union-attr]
                pass
        finally:
            supervisor.close()
            await serving

    asyncio.run(test())
