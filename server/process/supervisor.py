"""`quill serve`'s own process: starts the engine's and the frontend's, and starts them again.

Knows: processes, signals, which engine is used by whom. Does not know: requests, ports' protocols.

It imports neither gRPC nor ONNX Runtime, so hardly anything can go wrong in it. A frontend that
dies is started again at the same ports and finds its engine loaded; the engine cancels what that
frontend had asked for. An engine that dies is started again when its frontend wants the next one.
"""

import asyncio
import contextlib
import logging
import pickle
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

from quill.server.errors import StartError
from quill.server.process.engine_process import EngineProcess, in_words
from quill.server.process.messages import (
    HEADER,
    TO_SUPERVISOR,
    Engine,
    Failed,
    Frames,
    FromSupervisor,
    Load,
    Release,
    Serving,
    frame,
)
from quill.server.settings import Settings

logger = logging.getLogger(__name__)

FRONTEND = "quill.server.serve.frontend_main"
RECEIVE_BYTES = 2**16
STOP_S = 30.0  # how long an engine's step under way may take to end
MAX_QUICK_DEATHS = 5  # of frontends, one after another
QUICK_S = 10.0


class Supervisor:
    """One server. `run` returns the exit code."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._directory = directory
        self._settings = settings
        self._frontend: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._was_ready = False
        self._engines: dict[int, EngineProcess] = {}
        self._newest = 0
        self._watches: set[asyncio.Task[None]] = set()
        self._loading = asyncio.Lock()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._pass_on, signal.SIGHUP)
        first = asyncio.ensure_future(self._engine_after(0))  # while the frontend starts
        first.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await self._run_frontends()
        finally:
            await asyncio.gather(*map(self._end, list(self._engines)))

    async def _run_frontends(self) -> int:
        """Until one ends that was told to, or that can't start."""
        num_quick = 0
        while True:
            began_s = time.monotonic()
            code = await self._run_frontend()
            if self._is_stopping or not self._was_ready:
                return code
            num_quick = num_quick + 1 if time.monotonic() - began_s < QUICK_S else 0
            if num_quick > MAX_QUICK_DEATHS:
                raise StartError(f"the frontend's process ends again and again: {in_words(code)}")
            logger.error("the frontend's process ended %s: it is started again", in_words(code))

    async def _run_frontend(self) -> int:
        own, control = socket.socketpair()
        own.setblocking(False)
        with own:
            with control:
                self._frontend = process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", FRONTEND, str(control.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(control.fileno(),),
                    start_new_session=True,  # a terminal's Ctrl-C reaches it through us alone
                )
            start = pickle.dumps((self._directory, self._settings, sys.argv[0]))
            serving = asyncio.ensure_future(self._serve(own, HEADER.pack(len(start)) + start))
            code = await process.wait()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        self._frontend = None
        for number in self._engines.keys() - {self._newest}:  # that were retiring
            await self._end(number)
        return code

    async def _serve(self, control: socket.socket, start: bytes) -> None:
        """A frontend's messages."""
        loop, frames = asyncio.get_running_loop(), Frames()
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(control, start)
            while data := await loop.sock_recv(control, RECEIVE_BYTES):
                for body in frames.feed(data):
                    message = TO_SUPERVISOR.decode(body)
                    if isinstance(message, Load):
                        await loop.sock_sendall(control, frame(await self._answer(message)))
                    elif isinstance(message, Release):
                        await self._release(message.number)
                    else:
                        self._note_ready(message)

    async def _answer(self, message: Load) -> FromSupervisor:
        try:
            return await self._engine_after(message.after)
        except StartError as error:
            return Failed(str(error))

    async def _engine_after(self, number: int) -> Engine:
        async with self._loading:
            process = self._engines.get(self._newest)
            if self._newest <= number or process is None or not process.is_alive:
                process = await asyncio.to_thread(EngineProcess, self._directory, self._settings)
                self._newest += 1
                self._engines[self._newest] = process
                watch = asyncio.ensure_future(self._watch(self._newest, process))
                self._watches.add(watch)
                watch.add_done_callback(self._watches.discard)
            return Engine(self._newest, process.path, process.ready)

    async def _watch(self, number: int, process: EngineProcess) -> None:
        how = await asyncio.to_thread(process.wait)
        if self._engines.get(number) is process:  # nobody told it to
            del self._engines[number]
            process.stop()
            logger.error("the engine's process ended %s", how)

    async def _release(self, number: int) -> None:
        """The newest one stays for the next frontend, unless that is what the server stops for."""
        if number != self._newest or self._is_stopping:
            await self._end(number)

    async def _end(self, number: int) -> None:
        process = self._engines.pop(number, None)
        if process is None:
            return
        process.stop()
        if not await asyncio.to_thread(process.join, STOP_S):
            logger.error("an engine's process hung in a step and was killed")

    def _note_ready(self, serving: Serving) -> None:
        self._was_ready = True
        self._settings = replace(
            self._settings,
            port=serving.port,
            http_port="off" if serving.http_port is None else serving.http_port,
            metrics_port="off" if serving.metrics_port is None else serving.metrics_port,
        )

    def _stop(self) -> None:
        self._is_stopping = True
        self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: signal.Signals) -> None:
        if self._frontend is not None:
            with contextlib.suppress(ProcessLookupError):
                self._frontend.send_signal(number)
