"""A loaded model with its engine, and the calls that rely on it.

Knows: how an engine is started and stopped. Does not know: how bundles are loaded, gRPC, ports.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from quill.server.frontend.served_model import ServedModel
from quill.server.outputs import EngineOutputs, FinishReason
from quill.server.request import Request
from quill.server.settings import STOP_S


class RunningEngine(Protocol):
    """An engine in a thread, or in a process of its own."""

    @property
    def pid(self) -> int: ...

    @property
    def busy_since_s(self) -> float | None:
        """When the step under way began; None: nothing is to do."""

    def submit(self, request: Request) -> None: ...
    def end(
        self, request_id: str, sequence: int | None = None, reason: FinishReason = "cancelled"
    ) -> None: ...
    def describe(self) -> str: ...
    def stop(self) -> None: ...
    def join(self, timeout_s: float) -> bool: ...


@dataclass(frozen=True)
class EngineEvents:
    """Whom an engine tells what. All are called on the event loop."""

    publish: Callable[[EngineOutputs], None]
    on_health: Callable[[bool], None]  # whether steps succeed
    on_gone: Callable[[], None]  # its process has ended, and wasn't told to


StartEngine = Callable[[EngineEvents], RunningEngine]


class ModelInstance:
    """Belongs to the event loop once it has started."""

    engine: RunningEngine  # from the start on

    def __init__(self, served: ServedModel, start_engine: StartEngine) -> None:
        self.served = served
        self._start_engine = start_engine
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self, events: EngineEvents) -> None:
        self.engine = self._start_engine(events)

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


class ModelLoader(Protocol):
    """What a server needs. Both take seconds to minutes, so another thread calls them."""

    def load(self) -> ModelInstance: ...
    def reload(self) -> ModelInstance: ...
