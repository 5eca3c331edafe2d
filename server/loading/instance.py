"""One bundle that serves: what is served, and the engine's thread that serves it.

Knows: calls that use it, how it is retired. Does not know: which others there are, gRPC.

A call keeps to the instance that it began with, so another one may take over at any moment: this
one goes on until the last of its calls has ended.
"""

import asyncio
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quill.server.engine.engine import Engine
from quill.server.engine.engine_thread import EngineThread
from quill.server.frontend.served_model import ServedModel
from quill.server.outputs import EngineOutputs

STOP_S = 30.0  # how long a step under way may take to end


class ModelInstance:
    """Belongs to the event loop once it has started, but for the engine's own thread."""

    engine: EngineThread  # from the start on

    def __init__(self, served: ServedModel, engine: Engine) -> None:
        self.served = served
        self._idle_engine = engine
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def start(
        self,
        publish: Callable[[EngineOutputs], None],
        on_health: Callable[["ModelInstance", bool], None],
    ) -> None:
        """Puts it on duty."""
        instance = weakref.ref(self)  # no ring: what nobody uses any more is freed at once

        def note_health(healthy: bool) -> None:
            here = instance()
            if here is not None:
                on_health(here, healthy)

        self.engine = EngineThread(self._idle_engine, publish, note_health)
        self.engine.start()

    @contextmanager
    def call(self) -> Iterator["ModelInstance"]:
        """For as long as a call relies on it."""
        self._num_calls += 1
        self._idle.clear()
        try:
            yield self
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._idle.set()

    @property
    def num_calls(self) -> int:
        return self._num_calls

    async def wait_until_idle(self) -> None:
        """Once no new calls begin here."""
        await self._idle.wait()

    async def stop(self) -> bool:
        """Ends what is left. False: a step under way doesn't end."""
        self.engine.stop()
        return await asyncio.to_thread(self.engine.join, STOP_S)
