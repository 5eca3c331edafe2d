"""The thread that owns the engine. All others send it messages.

Knows: threads, the mailbox. Does not know: what an engine does in a step.

`submit`, `end` and `stop` are called from one thread, the event loop's. `publish` and `on_health`
are called from the engine's thread, once a step at most; they must return at once.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from quill.server.engine.engine import Engine
from quill.server.errors import StepError, UnavailableError
from quill.server.outputs import EngineOutputs, FailEvent, FinishReason
from quill.server.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    arrived_s: float


@dataclass(frozen=True, slots=True)
class _End:
    request_id: str
    sequence: int | None
    reason: FinishReason


class _Stop:
    pass


_Message = _Submit | _End | _Stop


class EngineThread:
    """Runs an engine until it is stopped."""

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[EngineOutputs], None],
        on_health: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._publish = publish
        self._on_health = on_health
        self._clock = clock
        self._healthy = True
        self._mailbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._stopped = False
        self.busy_since_s: float | None = None  # None: it waits for messages

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """From here on the request is answered by events, whatever happens."""
        if self._stopped:
            reason = "the server is stopping. Try another one, or later"
            raise UnavailableError(reason, "stopping")
        self._mailbox.put(_Submit(request, self._clock()))

    def end(
        self, request_id: str, sequence: int | None = None, reason: FinishReason = "cancelled"
    ) -> None:
        """Ends a request, or one of its sequences, at the next step. Unknown ones are ignored."""
        self._mailbox.put(_End(request_id, sequence, reason))

    def describe(self) -> str:
        return self._engine.describe()

    def stop(self) -> None:
        """Ends what is running with UNAVAILABLE, after the step under way. Doesn't wait for it."""
        self._stopped = True
        self._mailbox.put(_Stop())

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the end; False if it didn't come in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            self._serve()
            self._publish(self._engine.abandon(UnavailableError("the server is stopping")))
        except Exception:
            # A bug: what the engine holds can't be relied upon any more.
            logger.exception("the engine broke down")
            self._on_health(False)
            self._publish(self._engine.abandon(StepError("the engine broke down; see its log")))
            self._reject()

    def _serve(self) -> None:
        while self._receive():
            self.busy_since_s = self._clock()
            batch = self._engine.step()
            self.busy_since_s = None
            if batch.events or batch.step is not None:
                self._publish(batch)
            if self._engine.is_broken == self._healthy:
                self._healthy = not self._healthy
                self._on_health(self._healthy)

    def _receive(self) -> bool:
        """Takes all messages; waits for one if there is nothing to do. False: stop."""
        while self._engine.is_idle or not self._mailbox.empty():
            message = self._mailbox.get()
            if isinstance(message, _Stop):
                return False
            if isinstance(message, _Submit):
                self._engine.submit(message.request, message.arrived_s)
            else:
                self._engine.end(message.request_id, message.sequence, message.reason)
        return True

    def _reject(self) -> None:
        """Rejects all requests, until the thread is stopped."""
        error = UnavailableError("the server is broken; it needs a restart")
        while not self._stopped:
            message = self._mailbox.get()
            if isinstance(message, _Submit):
                self._publish(EngineOutputs((FailEvent(message.request.request_id, error),), None))
