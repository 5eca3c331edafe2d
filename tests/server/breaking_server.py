"""A gRPC server made of bare frames, which ends its streams as proxies do whose server died.

Knows: as much of HTTP/2 as that takes (RFC 9113). Does not know: what requests hold. Each gets the
same messages, and then the next of the endings that the server was given.
"""

import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from google.protobuf.message import Message

_PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING = 0, 1, 3, 4, 6
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_LENGTH = 5  # bytes before a gRPC message
# What HTTP/2 calls the reasons of a reset.
INTERNAL_ERROR, REFUSED_STREAM, CANCEL = 2, 7, 8


@dataclass(frozen=True)
class Reset:
    """Of the stream alone: the connection stands."""

    reason: int


@dataclass(frozen=True)
class Status:
    """As a server says it itself; `details` are google.rpc's."""

    code: int
    message: str = ""
    details: str = ""  # in base64


HANG_UP = "hang up"  # the connection, without a word
NO_END = "no end"  # the stream's last frame, and no status in it
OK = Status(0)
Ending = Reset | Status | str


class BreakingServer:
    """`endings`: of its calls, one after another; the last one counts for all that follow."""

    def __init__(self, messages: Sequence[Message], endings: Sequence[Ending]) -> None:
        self._messages, self._endings = messages, endings
        self.requests: list[bytes] = []
        self.may_end = threading.Event()  # the calls; so that what came before is heard
        self.may_end.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def num_calls(self) -> int:
        return len(self.requests)

    def close(self) -> None:
        self.may_end.set()
        for each in (self._listener, *self._connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, EOFError), connection, connection.makefile("rb") as stream:
            stream.read(_PREFACE)
            connection.sendall(_frame(_SETTINGS, 0, 0))
            bodies: dict[int, bytes] = defaultdict(bytes)
            while header := stream.read(9):
                length, kind, flags = int.from_bytes(header[:3], "big"), header[3], header[4]
                number = int.from_bytes(header[5:], "big")
                payload = stream.read(length)
                if kind in (_SETTINGS, _PING) and not flags & _ACK:
                    connection.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
                elif kind == _DATA:
                    bodies[number] += payload
                if kind == _DATA and flags & _END_STREAM:
                    self._answer(connection, number, bodies.pop(number)[_LENGTH:])

    def _answer(self, connection: socket.socket, number: int, request: bytes) -> None:
        ending = self._endings[min(self.num_calls, len(self._endings) - 1)]
        self.requests.append(request)
        headers = b"\x88" + _field("content-type", "application/grpc")  # :status 200
        connection.sendall(_frame(_HEADERS, _END_HEADERS, number, headers))
        for message in self._messages if ending == OK else self._messages[:-1]:
            body = message.SerializeToString()
            connection.sendall(_frame(_DATA, 0, number, struct.pack(">BI", 0, len(body)) + body))
        self.may_end.wait()
        if ending == HANG_UP:
            raise EOFError
        connection.sendall(_end(ending, number))


def _end(ending: Ending, number: int) -> bytes:
    if isinstance(ending, Reset):
        return _frame(_RST_STREAM, 0, number, struct.pack(">I", ending.reason))
    if isinstance(ending, Status):
        trailers = _field("grpc-status", str(ending.code)) + _field("grpc-message", ending.message)
        if ending.details:
            trailers += _field("grpc-status-details-bin", ending.details)
        return _frame(_HEADERS, _END_HEADERS | _END_STREAM, number, trailers)
    return _frame(_DATA, _END_STREAM, number)


def _frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, number) + payload


def _field(name: str, value: str) -> bytes:
    """Of a header, told plainly (RFC 7541, 6.2.2); shorter than 127 bytes."""
    return b"\0" + b"".join(bytes([len(each)]) + each.encode() for each in (name, value))


@contextmanager
def breaking_server(messages: Sequence[Message], *endings: Ending) -> Iterator[BreakingServer]:
    server = BreakingServer(messages, endings)
    try:
        yield server
    finally:
        server.close()
