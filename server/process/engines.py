"""The engines' processes of a server: which is the newest, and which frontends use which.

Knows: processes, frontends by name. Does not know: frontends' processes, messages, requests.

The newest engine stays for the next frontend; an older one ends when nobody uses it any more. So
does the newest while an older one is in use: the frontends have refused its bundle.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quill.server.errors import StartError
from quill.server.process.engine_process import EngineProcess
from quill.server.settings import STOP_S, Settings

logger = logging.getLogger(__name__)


@dataclass
class UsedEngine:
    process: EngineProcess
    num_leases: Counter[str]  # of each frontend


class Engines:
    """Belongs to the event loop."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._directory = directory
        self._settings = settings
        self._engines: dict[int, UsedEngine] = {}
        self._numbers = itertools.count(1)
        self._newest = 0  # 0: there is none
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading = asyncio.Lock()
        self.is_closing = False  # then the newest one ends with its last user, too

    async def newest_after(self, number: int, user: str = "") -> tuple[int, EngineProcess]:
        """For this user. A new one is started if the newest isn't newer than `number`, or has died.

        StartError: the bundle can't be served.
        """
        async with self._loading:
            engine = self._engines.get(self._newest)
            if self._newest <= number or engine is None or not engine.process.is_alive:
                return await self._start(user)
            if user:
                engine.num_leases[user] += 1
            return self._newest, engine.process

    async def _start(self, user: str) -> tuple[int, EngineProcess]:
        """If the server stops, or the user dies, while the bundle is loaded, the process ends."""
        if self.is_closing:
            raise StartError("the server is stopping")
        before, process = self._newest, EngineProcess(self._directory, self._settings)
        number = self._newest = next(self._numbers)
        self._engines[number] = UsedEngine(process, Counter([user] if user else ()))
        try:
            await asyncio.to_thread(process.wait_until_ready)
        except BaseException:
            self._newest = before
            await self._end(number)
            raise
        self._begin(self._watch(number, process))
        self._end_unused()
        return number, process

    def release(self, number: int, user: str) -> None:
        """One lease of the user's."""
        engine = self._engines.get(number)
        if engine is not None:
            engine.num_leases -= Counter([user])
            self._end_unused()

    def forget(self, user: str) -> None:
        """It has died."""
        for engine in self._engines.values():
            engine.num_leases.pop(user, None)
        self._end_unused()

    async def close(self) -> None:
        self.is_closing = True
        await asyncio.gather(*map(self._end, list(self._engines)), *self._tasks)

    def _end_unused(self) -> None:
        used = {number for number, engine in self._engines.items() if engine.num_leases}
        if used and self._newest in self._engines:  # one that has died was in use
            self._newest = max(used)
        stays = set() if self.is_closing else {self._newest}
        for number in set(self._engines) - used - stays:
            self._begin(self._end(number))

    async def _watch(self, number: int, process: EngineProcess) -> None:
        how = await asyncio.to_thread(process.wait)
        if self._engines.pop(number, None) is not None:  # nobody told it to
            process.stop()
            logger.error("the engine's process ended %s", how)

    async def _end(self, number: int) -> None:
        engine = self._engines.pop(number, None)
        if engine is None:
            return
        engine.process.stop()
        if not await asyncio.to_thread(engine.process.join, STOP_S):
            logger.error("an engine's process hung in a step and was killed")

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
