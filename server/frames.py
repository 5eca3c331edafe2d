"""Frames on a stream socket: a length in four bytes, and that many bytes.

Knows: how they are cut. Does not know: what is in them, event loops.
"""

import socket
import struct
from collections.abc import Iterator

_HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 2**30  # a frame beyond it is a bug: the other side is a process of ours
RECEIVE_BYTES = 2**18


def pack(body: bytes) -> bytes:
    return _HEADER.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield body


def received(connection: socket.socket) -> Iterator[bytes]:
    """The bodies of frames, until the other side has closed the connection. Blocks."""
    frames = Frames()
    while data := connection.recv(RECEIVE_BYTES):
        yield from frames.feed(data)


def receive(connection: socket.socket) -> bytes:
    """The next frame's body, where no other frame can be on its way. Blocks. EOFError: closed."""
    for body in received(connection):
        return body
    raise EOFError
