"""The engines' processes of a server: which is the newest, and which frontends use which.

Knows: processes, frontends by name. Does not know: frontends' processes, messages, requests.

The newest engine stays for the next frontend; an older one ends when nobody uses it any more.
"""

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from quill.server.process.engine_process import EngineProcess
from quill.server.settings import STOP_S, Settings

logger = logging.getLogger(__name__)


class Engines:
    """Belongs to the event loop."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._directory = directory
        self._settings = settings
        self._processes: dict[int, EngineProcess] = {}
        self._users: dict[int, set[str]] = {}
        self._newest = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading = asyncio.Lock()
        self.is_closing = False  # then the newest one ends with its last user, too

    async def newest_after(self, number: int, user: str = "") -> tuple[int, EngineProcess]:
        """For this user. A new one is started if the newest isn't newer than `number`, or has died.

        StartError: the bundle can't be served.
        """
        async with self._loading:
            process = self._processes.get(self._newest)
            if self._newest <= number or process is None or not process.is_alive:
                process = await asyncio.to_thread(EngineProcess, self._directory, self._settings)
                self._newest += 1
                self._processes[self._newest] = process
                self._begin(self._watch(self._newest, process))
            if user:
                self._users.setdefault(self._newest, set()).add(user)
            return self._newest, process

    def release(self, number: int, user: str) -> None:
        users = self._users.get(number, set())
        users.discard(user)
        if not users and (number != self._newest or self.is_closing):
            self._begin(self._end(number))

    def forget(self, user: str) -> None:
        """It has died."""
        for number in list(self._processes):
            self.release(number, user)

    async def close(self) -> None:
        await asyncio.gather(*map(self._end, list(self._processes)), *self._tasks)

    async def _watch(self, number: int, process: EngineProcess) -> None:
        how = await asyncio.to_thread(process.wait)
        if self._processes.get(number) is process:  # nobody told it to
            del self._processes[number]
            process.stop()
            logger.error("the engine's process ended %s", how)

    async def _end(self, number: int) -> None:
        process = self._processes.pop(number, None)
        self._users.pop(number, None)
        if process is None:
            return
        process.stop()
        if not await asyncio.to_thread(process.join, STOP_S):
            logger.error("an engine's process hung in a step and was killed")

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
