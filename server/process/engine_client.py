"""A frontend's connection to the engine's process, on the event loop.

Knows: frames, which requests are unanswered. Does not know: what they are, how the process is
started. When the connection ends, every unanswered request fails with UNAVAILABLE at once.
"""

import logging
import socket
import time
from typing import Protocol

from quill.server.errors import UnavailableError
from quill.server.loading.instance import EngineEvents
from quill.server.outputs import (
    EngineOutputs,
    FailEvent,
    FinishEvent,
    FinishReason,
    QueueStats,
)
from quill.server.process.frame_socket import FrameSocket
from quill.server.process.messages import TO_FRONTEND, End, Outputs, Submit, frame
from quill.server.request import Request

logger = logging.getLogger(__name__)

MAX_NAMED = 8  # requests


class Process(Protocol):
    """The process at the other end."""

    @property
    def pid(self) -> int: ...
    def stop(self) -> None: ...


class EngineClient:
    """Belongs to the event loop."""

    def __init__(self, sock: socket.socket, process: Process, events: EngineEvents) -> None:
        self._frames = FrameSocket(sock, self._receive, self._lose)
        self._process = process
        self._tell = events
        self._open: dict[str, int] = {}  # the unfinished sequences of each request
        self._heard_s = 0.0  # when the last frame came, or the first request after a pause

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def busy_since_s(self) -> float | None:
        """Since when the engine has published nothing though it has requests; None: it has none.

        It publishes after every step.
        """
        return self._heard_s if self._open else None

    def describe(self) -> str:
        names = ", ".join(sorted(self._open)[:MAX_NAMED])
        more = ", …" if len(self._open) > MAX_NAMED else ""
        return f"for some of the requests {names}{more}"

    def submit(self, request: Request) -> None:
        """From here on the request is answered by events, whatever happens."""
        if self._frames.is_closed:
            raise UnavailableError("the server stops, or restarts its engine. Try again later")
        now_s = time.monotonic()
        if not self._open:
            self._heard_s = now_s
        self._open[request.request_id] = request.num_sequences
        self._frames.send(frame(Submit(request, now_s)))

    def end(
        self, request_id: str, sequence: int | None = None, reason: FinishReason = "cancelled"
    ) -> None:
        """Ends a request, or one of its sequences, at the next step. Unknown ones are ignored."""
        if request_id in self._open:
            self._frames.send(frame(End(request_id, sequence, reason)))

    def stop(self) -> None:
        """Ends what is running with UNAVAILABLE, and then the process."""
        if not self._frames.is_closed:
            self._frames.close()
            self._fail_all(UnavailableError("the server is stopping"))
        self._process.stop()

    def join(self, timeout_s: float) -> bool:
        """Whoever started the process waits for its end, and kills one that hangs."""
        return True

    def _fail_all(self, error: UnavailableError) -> None:
        failed = tuple(FailEvent(request_id, error) for request_id in self._open)
        self._open.clear()
        self._tell.publish(EngineOutputs(failed, None, QueueStats(0, 0)))

    def _receive(self, body: bytes) -> None:
        message = TO_FRONTEND.decode(body)
        if isinstance(message, Outputs):
            self._heard_s = time.monotonic()
            self._note(message.outputs)
            self._tell.publish(message.outputs)
        else:
            self._tell.on_health(message.is_good)

    def _note(self, outputs: EngineOutputs) -> None:
        for event in outputs.events:
            if isinstance(event, FailEvent):
                self._open.pop(event.request_id, None)
            elif isinstance(event, FinishEvent) and event.request_id in self._open:
                self._open[event.request_id] -= 1
                if not self._open[event.request_id]:
                    del self._open[event.request_id]

    def _lose(self) -> None:
        num_open = len(self._open)
        self._fail_all(UnavailableError("the engine's process ended, and is started again"))
        logger.error("the connection to the engine's process ended; %d requests failed", num_open)
        self._tell.on_gone()
