"""The thread that owns the engine. All others send it messages.

Knows: threads, the mailbox, that a constraint is compiled before its request joins the engine.
Does not know: what an engine does in a step.

`submit`, `end` and `stop` are called from one thread, the event loop's. `publish` and `on_health`
are called from the engine's thread, once a step at most; they must return at once.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from quill.server.engine.engine import Engine
from quill.server.errors import RequestError, StepError, UnavailableError
from quill.server.outputs import EngineOutputs, FailEvent, FinishReason
from quill.server.request import Grammar, GrammarCompiler, Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    arrived_s: float
    grammar: Future[Grammar] | None  # None: the request has no constraint


@dataclass(frozen=True, slots=True)
class _Compiled:
    request_id: str


@dataclass(frozen=True, slots=True)
class _End:
    request_id: str
    sequence: int | None
    reason: FinishReason


class _Stop:
    pass


_Message = _Submit | _Compiled | _End | _Stop


class EngineThread:
    """Runs an engine until it is stopped."""

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[EngineOutputs], None],
        on_health: Callable[[bool], None],
        grammars: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`grammars` None: no request has a constraint."""
        self._engine = engine
        self._publish = publish
        self._on_health = on_health
        self._grammars = grammars
        self._compiling: dict[str, _Submit] = {}  # requests whose grammar isn't there yet
        self._clock = clock
        self._healthy = True
        self._mailbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._stopped = False
        self.busy_since_s: float | None = None  # None: it waits for messages

    @property
    def pid(self) -> int:
        return os.getpid()

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request, arrived_s: float | None = None) -> None:
        """From here on the request is answered by events, whatever happens."""
        if self._stopped:
            reason = "the server is stopping. Try another one, or later"
            raise UnavailableError(reason, "stopping")
        grammar = None
        if request.constraint is not None:
            assert self._grammars is not None, "the frontend rejects these"
            grammar = self._grammars.start(request.constraint, request.owner)
        self._mailbox.put(
            _Submit(request, self._clock() if arrived_s is None else arrived_s, grammar)
        )
        if grammar is not None:  # after the message before it, even if it is done
            compiled = _Compiled(request.request_id)
            grammar.add_done_callback(lambda _: self._mailbox.put(compiled))

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
            self._abandon(UnavailableError("the server is stopping"))
            self._engine.close()
        except Exception:
            # A bug: what the engine holds can't be relied upon any more.
            logger.exception("the engine broke down")
            self._on_health(False)
            self._abandon(StepError("the engine broke down; see its log"))
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
                self._submit(message)
            elif isinstance(message, _Compiled):
                self._join(message.request_id)
            else:
                self._end(message)
        return True

    def _submit(self, message: _Submit) -> None:
        if message.grammar is None:
            self._engine.submit(message.request, message.arrived_s)
        else:
            self._compiling[message.request.request_id] = message

    def _join(self, request_id: str) -> None:
        """The request's grammar is compiled, or couldn't be."""
        message = self._compiling.pop(request_id, None)
        if message is None or message.grammar is None:
            return  # it was ended
        error = message.grammar.exception()
        if error is None:
            self._engine.submit(message.request, message.arrived_s, message.grammar.result())
            return
        if not isinstance(error, RequestError):
            logger.error("a bug in compiling a grammar, request %s", request_id, exc_info=error)
            error = StepError(f"a bug in the server; its log has more under {request_id}")
        self._publish(EngineOutputs((FailEvent(request_id, error),), None))

    def _end(self, message: _End) -> None:
        waiting = self._compiling.pop(message.request_id, None)
        if waiting is not None:  # the engine answers it as any that has no token yet
            assert waiting.grammar is not None
            waiting.grammar.cancel()
            self._engine.submit(waiting.request, waiting.arrived_s)
        self._engine.end(message.request_id, message.sequence, message.reason)

    def _abandon(self, error: RequestError) -> None:
        for message in self._compiling.values():
            self._engine.submit(message.request, message.arrived_s)
        self._publish(self._engine.abandon(error))

    def _reject(self) -> None:
        """Rejects all requests, until the thread is stopped."""
        error = UnavailableError("the server is broken; it needs a restart")
        while not self._stopped:
            message = self._mailbox.get()
            if isinstance(message, _Submit):
                self._publish(EngineOutputs((FailEvent(message.request.request_id, error),), None))
