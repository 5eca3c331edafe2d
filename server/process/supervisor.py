"""`quill serve`'s own process: starts the engine's and the frontends', and starts them again.

Knows: processes, signals, which frontend wants what. Does not know: requests, ports' protocols.

It imports neither gRPC nor ONNX Runtime nor numpy, so hardly anything can go wrong in it. A
frontend that dies is started again at the same ports and finds its engine loaded; the engine
cancels what that frontend had asked for. An engine that dies is started again when a frontend wants
the next one. Of several frontends one reloads, and the others follow it to the new engine.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from quill.server.errors import StartError
from quill.server.process.control import (
    TO_SUPERVISOR,
    Answer,
    Collect,
    Engine,
    Failed,
    FromSupervisor,
    Load,
    Newer,
    Release,
    Report,
    Samples,
    Serving,
    control_frame,
    start_frame,
)
from quill.server.process.counts import Counts
from quill.server.process.engine_process import in_words
from quill.server.process.engines import Engines
from quill.server.process.frame_socket import FrameSocket
from quill.server.process.ports import Ports
from quill.server.settings import Settings
from quill.server.telemetry.merged_metrics import MergedMetrics

logger = logging.getLogger(__name__)

FRONTEND = "quill.server.serve.frontend_main"
MAX_QUICK_DEATHS = 5  # of one frontend, one after another
QUICK_S = 10.0
COLLECT_S = 1.0  # how long frontends have to report their metrics


class Frontend:
    """One frontend's process, until it ends."""

    def __init__(
        self, supervisor: "Supervisor", process: asyncio.subprocess.Process, control: socket.socket
    ) -> None:
        self.name = str(process.pid)
        self.process = process
        self.is_serving = False
        self.reported = asyncio.Event()
        self.frames = FrameSocket(control, lambda body: supervisor.handle(self, body), lambda: None)

    def tell(self, message: FromSupervisor) -> None:
        self.frames.send(control_frame(message))

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Supervisor:
    """One server. `run` returns the exit code."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        if settings.frontends > 1:
            self._ports = Ports(settings)
            settings = self._ports.settings
        self._directory = directory
        self._settings = settings
        self._engines = Engines(directory, settings)
        self._counts = Counts(settings.max_queue)
        self._metrics = MergedMetrics()
        self._frontends: dict[int, Frontend] = {}  # those that run
        self._newest = 0  # the engine that all frontends shall have
        self._is_stopping = False
        self._was_ready = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        first = asyncio.ensure_future(self._engines.newest_after(0))  # while frontends start
        first.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await self._run_frontends()
        finally:
            await self._engines.close()

    async def _run_frontends(self) -> int:
        """Until those have ended that were told to; one that can't start ends all."""
        keeping = [
            asyncio.ensure_future(self._keep_frontend(index))
            for index in range(self._settings.frontends)
        ]
        done, others = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
        if not self._is_stopping:
            self._stop()
        if others:
            await asyncio.wait(others)
        return next(filter(None, (task.result() for task in (*done, *others))), 0)

    async def _keep_frontend(self, index: int) -> int:
        num_quick = 0
        while True:
            began_s = time.monotonic()
            code = await self._run_frontend(index)
            if self._is_stopping or not self._was_ready:
                return code
            num_quick = num_quick + 1 if time.monotonic() - began_s < QUICK_S else 0
            if num_quick > MAX_QUICK_DEATHS:
                raise StartError(f"the frontend's process ends again and again: {in_words(code)}")
            logger.error("the frontend's process ended %s: it is started again", in_words(code))

    async def _run_frontend(self, index: int) -> int:
        own, control = socket.socketpair()
        with control:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", FRONTEND, str(control.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(control.fileno(),),
                start_new_session=True,  # a terminal's Ctrl-C reaches it through us alone
            )
        frontend = self._frontends[index] = Frontend(self, process, own)
        if self._is_stopping:  # it wasn't there to be told
            frontend.signal(signal.SIGTERM)
        frontend.frames.send(start_frame(self._directory, self._settings, sys.argv[0], index))
        code = await process.wait()
        del self._frontends[index]
        frontend.frames.close()
        frontend.reported.set()
        self._engines.forget(frontend.name)
        self._counts.forget(frontend.name)
        self._metrics.forget(frontend.name)
        return code

    def handle(self, frontend: Frontend, body: bytes) -> None:
        message = TO_SUPERVISOR.decode(body)
        if isinstance(message, Load):
            self._begin(self._load(frontend, message.after))
        elif isinstance(message, Release):
            self._engines.release(message.number, frontend.name)
        elif isinstance(message, Serving):
            self._note_serving(frontend, message)
        elif isinstance(message, Collect):
            self._begin(self._collect(frontend, message.number))
        elif isinstance(message, Samples):
            self._metrics.note(frontend.name, message.metrics)
            frontend.reported.set()
        else:
            answer = self._counts.handle(frontend.name, message)
            if answer is not None:
                frontend.tell(answer)

    async def _load(self, frontend: Frontend, after: int) -> None:
        try:
            number, process = await self._engines.newest_after(after, frontend.name)
            connected = process.connect()
        except StartError as error:
            frontend.tell(Failed(str(error)))
            return
        except OSError:
            frontend.tell(Failed("the engine's process has ended"))
            return
        if frontend.frames.is_closed:
            connected.close()
            self._engines.release(number, frontend.name)
            return
        frontend.frames.send_with(control_frame(Engine(number, process.ready)), connected)

    async def _collect(self, asking: Frontend, number: int) -> None:
        """Of a frontend that doesn't answer in time, what it said last."""
        frontends = list(self._frontends.values())
        for each in frontends:
            each.reported.clear()
            each.tell(Report())
        waits = [asyncio.ensure_future(each.reported.wait()) for each in frontends]
        _, late = await asyncio.wait(waits, timeout=COLLECT_S)
        for wait in late:
            wait.cancel()
        asking.tell(Answer(number, None, self._metrics.merged()))

    def _note_serving(self, frontend: Frontend, serving: Serving) -> None:
        self._was_ready = frontend.is_serving = True
        self._settings = replace(
            self._settings,
            port=serving.port,
            http_port="off" if serving.http_port is None else serving.http_port,
            metrics_port="off" if serving.metrics_port is None else serving.metrics_port,
        )
        if serving.engine > self._newest:
            self._newest = serving.engine
            for other in self._frontends.values():
                if other is not frontend:
                    other.tell(Newer(serving.engine))

    def _stop(self) -> None:
        self._is_stopping = self._engines.is_closing = True
        for frontend in self._frontends.values():
            frontend.signal(signal.SIGTERM)

    def _reload(self) -> None:
        """One does; the others follow it."""
        serving = [each for each in self._frontends.values() if each.is_serving]
        for frontend in serving[:1]:
            frontend.signal(signal.SIGHUP)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
