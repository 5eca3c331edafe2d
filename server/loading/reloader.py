"""Which bundle serves, and how another one takes over without anybody noticing.

Knows: instances, loading, the watchdog. Does not know: gRPC, ports.

A call keeps to the instance that it began with. The new bundle is loaded beside the old one and
tried out. If anything is wrong with it, it is refused and the old one goes on. Otherwise new calls
go to the new one; the old one finishes its calls, and then its memory is freed. An engine whose
process ends is loaded again.
"""

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

from quill.server.errors import ReloadError
from quill.server.frontend.served_model import ServedModel
from quill.server.loading.instance import EngineEvents, ModelInstance
from quill.server.machine.memory import trim_heap
from quill.server.outputs import EngineOutputs

logger = logging.getLogger(__name__)

UNWIND_S = 5.0
MAX_RESTARTS = 5  # of an engine that can't be loaded any more
RESTART_S = 1.0  # before the second attempt; more before each further one
LOADING = "loading"

OnHealth = Callable[[str, bool], None]
Load = Callable[[], ModelInstance]


class Watchdog:
    """Looks now and then. Says once that a step hangs, and once that it has ended after all."""

    def __init__(self, max_step_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_step_s = max_step_s
        self._clock = clock
        self._hangs_since_s: float | None = None

    @property
    def period_s(self) -> float:
        return min(1.0, self._max_step_s / 4)

    def look(self, busy_since_s: float | None, describe: Callable[[], str]) -> bool:
        """Whether a step hangs. `busy_since_s`: when it began; None: there is none."""
        now_s = self._clock()
        hangs = busy_since_s is not None and now_s - busy_since_s > self._max_step_s
        if self._hangs_since_s is not None and busy_since_s != self._hangs_since_s:
            logger.info("the step that hung has ended")
            self._hangs_since_s = None
        if hangs and busy_since_s is not None and self._hangs_since_s is None:
            self._hangs_since_s = busy_since_s
            logger.error(
                "a step has run for %.1f s, and %g s is the limit: health says NOT_SERVING until "
                "it ends. It is %s",
                now_s - busy_since_s,
                self._max_step_s,
                describe(),
            )
        return hangs


class Reloader:
    """Belongs to the event loop.

    `on_health(problem, is_there)`; `on_model`: what serves from now on; `on_lost` ends the server.
    """

    def __init__(
        self,
        publish: Callable[[EngineOutputs], None],
        on_health: OnHealth,
        max_step_s: float,
        on_model: Callable[[ServedModel], None],
        on_restart: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._publish = publish
        self._on_health = on_health
        self._on_model = on_model
        self._on_restart = on_restart
        self._on_lost = on_lost
        self._watchdog = Watchdog(max_step_s)
        self.instance: ModelInstance | None = None  # None: nothing is loaded
        self._tasks: set[asyncio.Task[None]] = set()  # retiring instances, restarts
        self._load: Load | None = None  # how the engine is loaded again
        self._is_reloading = False
        self._is_closed = False

    async def take_over(self, load: Load) -> ModelInstance:
        """Loads a bundle and lets it serve. The one before it retires."""
        instance, before = await _in_thread(load), self.instance
        if self._is_closed:
            await self._refuse(instance)
            raise ReloadError("the server is stopping")
        instance.start(self._events(weakref.ref(instance)))
        self.instance, self._load = instance, load
        self._on_model(instance.served)
        self._on_health("failing", False)
        self._on_health("restarting", False)
        if before is not None:
            self._begin(self._retire(before))
        return instance

    async def reload(self, load: Load) -> ModelInstance:
        """The same, for a server that serves already: whatever goes wrong leaves it serving."""
        if self._is_reloading or self.instance is None or self._is_closed:
            state = "stopping" if self._is_closed else "loading a bundle already"
            raise ReloadError(f"the server is {state}. Try again later")
        self._is_reloading = True
        try:
            instance = await self.take_over(load)
        except Exception as error:  # whatever a bundle can do to us: it has served nobody
            raise ReloadError(
                f"the new bundle is refused, and the old one goes on: {error}"
            ) from error
        finally:
            self._is_reloading = False
        logger.info("the bundle %s is on duty now", instance.served.manifest.name)
        return instance

    def _events(self, instance: "weakref.ref[ModelInstance]") -> EngineEvents:
        """By a weak reference: what nobody uses any more is freed at once."""

        def note_health(is_good: bool) -> None:
            if self.instance is not None and instance() is self.instance:
                self._on_health("failing", not is_good)

        def note_gone() -> None:
            if self.instance is not None and instance() is self.instance and not self._is_closed:
                self._restart()

        return EngineEvents(self._publish, note_health, note_gone)

    def _restart(self) -> None:
        """New calls are refused as while the server loads, until the engine is back."""
        gone, self.instance = self.instance, None
        self._on_health("restarting", True)
        self._on_restart()
        self._begin(self._load_again(gone))

    async def _load_again(self, gone: ModelInstance | None) -> None:
        if gone is not None:
            await gone.stop()
        load, gone = self._load, None
        for num_failed in range(MAX_RESTARTS):
            await asyncio.sleep(RESTART_S * num_failed)
            if self._is_closed or load is None:
                return
            try:
                instance = await self.take_over(load)
            except Exception as error:
                logger.error("the engine can't be started again: %s", error)
            else:
                logger.info("the engine is back with %s", instance.served.manifest.name)
                return
        logger.error("the engine can't be started: the server stops")
        self._on_lost()

    async def _refuse(self, instance: ModelInstance) -> None:
        """Loaded too late: what it holds ends."""
        instance.start(EngineEvents(lambda outputs: None, lambda is_good: None, lambda: None))
        await instance.stop()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def watch(self) -> None:
        """Until it is cancelled: looks whether a step hangs."""
        while True:
            await asyncio.sleep(self._watchdog.period_s)
            self._look()

    def _look(self) -> None:
        """By itself, so that no bundle stays in a variable until the next look."""
        if self.instance is not None:
            engine = self.instance.engine
            hangs = self._watchdog.look(engine.busy_since_s, engine.describe)
            self._on_health("hanging", hangs)

    async def close(self) -> None:
        """What is still running ends with UNAVAILABLE."""
        self._is_closed = True
        if self.instance is not None:
            await self.instance.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _retire(self, instance: ModelInstance) -> None:
        name, num_calls = instance.served.manifest.name, instance.num_calls
        logger.info("the old bundle %s retires; %d calls are still on it", name, num_calls)
        try:
            await instance.wait_until_idle()
        finally:
            ended = await instance.stop()
        gone = asyncio.Event()
        weakref.finalize(instance, gone.set).atexit = False
        del instance
        with contextlib.suppress(TimeoutError):
            # The last call has ended, but for its last few lines.
            await asyncio.wait_for(gone.wait(), UNWIND_S)
        await asyncio.to_thread(trim_heap)
        if ended:
            logger.info("the old bundle %s has gone", name)
        else:
            logger.error("the old bundle %s hangs in a step: its memory isn't freed", name)


async def _in_thread(load: Load) -> ModelInstance:
    """In a thread that nobody waits for at the end: loading may take long, and stopping mustn't."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ModelInstance] = loop.create_future()

    def settle(loaded: ModelInstance | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        elif loaded is not None:
            future.set_result(loaded)

    def work() -> None:
        loaded, error = None, None
        try:
            loaded = load()
        except BaseException as raised:  # raised again where it is waited for
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, loaded, error)

    threading.Thread(target=work, name=LOADING, daemon=True).start()
    return await future


def is_loading() -> bool:
    """Whether a bundle is being loaded, wanted or not: loading can't be told to stop."""
    return any(thread.name == LOADING for thread in threading.enumerate())
