"""The engine's side of its connections to frontends: requests come in, outputs go out.

Knows: the engine's thread, frames, which connection a request came by. Does not know: how a bundle
is loaded, other processes.
"""

import contextlib
import logging
import socket
import threading
from collections import deque

from quill.server.engine.engine_thread import EngineThread
from quill.server.frames import received
from quill.server.loading.loader import LoadedEngine
from quill.server.outputs import EngineOutputs, Event, FailEvent, FinishEvent
from quill.server.process.messages import TO_ENGINE, Health, Outputs, Submit, ToEngine, frame
from quill.server.settings import STOP_S

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 2**28  # of one frontend that doesn't read: then it is taken for dead


class Connection:
    """One frontend. The engine's thread sends to it and never waits for it."""

    def __init__(self, sock: socket.socket, server: "EngineServer") -> None:
        self._socket = sock
        self._server = server
        self._unsent: deque[bytes] = deque()
        self._num_unsent = 0
        self._changed = threading.Condition()
        self._is_closed = False
        for work, name in ((self._receive, "receive"), (self._send_rest, "send")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def send(self, data: bytes) -> None:
        with self._changed:
            if self._is_closed:
                return
            if not self._unsent:
                try:
                    num_sent = self._socket.send(data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    num_sent = 0
                except OSError:
                    return  # `_receive` finds the same
                if num_sent == len(data):
                    return
                data = data[num_sent:]
            self._unsent.append(data)
            self._num_unsent += len(data)
            self._changed.notify()
        if self._num_unsent > MAX_UNSENT_BYTES:
            logger.error("a frontend doesn't read its events: it is disconnected")
            self.close()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send_rest(self) -> None:
        """What the socket's buffer had no room for."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._is_closed)
                if self._is_closed:
                    return
                data = self._unsent[0]
            try:
                self._socket.sendall(data)
            except OSError:
                return
            with self._changed:
                self._unsent.popleft()
                self._num_unsent -= len(data)

    def _receive(self) -> None:
        try:
            for body in received(self._socket):
                self._server.handle(self, TO_ENGINE.decode(body))
        except OSError:
            pass
        except Exception:
            logger.exception("a message of a frontend can't be read: it is disconnected")
        self.close()
        self._server.remove(self)
        self._socket.close()


class EngineServer:
    """The engine's thread, and who gets which of its events."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._thread = EngineThread(
            loaded.engine, self._publish, self._tell_health, loaded.grammars
        )
        self._connections: tuple[Connection, ...] = ()
        self._open: dict[str, tuple[Connection, int]] = {}  # and how many sequences are unfinished
        self._lock = threading.Lock()
        self._health = Health(True)

    def start(self) -> None:
        self._thread.start()

    def accept(self, sock: socket.socket) -> None:
        with self._lock:
            connection = Connection(sock, self)
            self._connections += (connection,)
            connection.send(frame(self._health))

    def remove(self, connection: Connection) -> None:
        """Its frontend is gone: nobody waits for its requests any more."""
        with self._lock:
            self._connections = tuple(c for c in self._connections if c is not connection)
            gone = [name for name, (owner, _) in self._open.items() if owner is connection]
        for request_id in gone:
            self._thread.end(request_id)

    def handle(self, connection: Connection, message: ToEngine) -> None:
        if isinstance(message, Submit):
            request = message.request
            with self._lock:
                self._open[request.request_id] = connection, request.num_sequences
            self._thread.submit(request, message.arrived_s)
        else:
            self._thread.end(message.request_id, message.sequence, message.reason)

    def stop(self) -> None:
        self._thread.stop()
        self._thread.join(STOP_S)

    def _publish(self, outputs: EngineOutputs) -> None:
        """Called from the engine's thread."""
        events: dict[Connection, list[Event]] = {each: [] for each in self._connections}
        with self._lock:
            for event in outputs.events:
                connection = self._owner(event)
                if connection in events:
                    events[connection].append(event)
        # One frontend counts the step; a server's metrics add up those of all frontends.
        step, queue, disk = outputs.step, outputs.queue, outputs.disk
        for connection, own in events.items():
            connection.send(frame(Outputs(EngineOutputs(tuple(own), step, queue, disk))))
            step = queue = disk = None

    def _owner(self, event: Event) -> Connection | None:
        connection, num_open = self._open.get(event.request_id, (None, 0))
        if connection is None:
            return None
        if isinstance(event, FailEvent) or (isinstance(event, FinishEvent) and num_open == 1):
            del self._open[event.request_id]
        elif isinstance(event, FinishEvent):
            self._open[event.request_id] = connection, num_open - 1
        return connection

    def _tell_health(self, is_good: bool) -> None:
        self._health = Health(is_good)
        for connection in self._connections:
            connection.send(frame(self._health))
