"""A socket with frames, on the event loop.

Knows: asyncio, descriptors that cross with a frame. Does not know: what frames are about.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from quill.server.frames import RECEIVE_BYTES, Frames

MAX_DESCRIPTORS = 16  # that are received at once


class FrameSocket:
    """Belongs to the event loop. All frames of one turn of the loop are sent together.

    `on_frame(body)`; `on_end()`: the other side has gone. Neither is called after `close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[], None],
        takes_sockets: bool = False,
    ) -> None:
        self._socket = sock
        self._takes_sockets = takes_sockets
        self._on_frame = on_frame
        self._on_end = on_end
        self._frames = Frames()
        self._unsent = bytearray()
        self._descriptors: deque[int] = deque()
        self.is_closed = False
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._receive)

    def send(self, frame: bytes) -> None:
        if self.is_closed:
            return
        if not self._unsent:
            self._loop.add_writer(self._socket, self._send_rest)
        self._unsent += frame

    def send_with(self, frame: bytes, sock: socket.socket) -> None:
        """Gives a socket away. Whoever hasn't read what came before is taken for dead."""
        with sock:
            self._send_rest()
            if self.is_closed:
                return
            try:
                is_sent = not self._unsent and socket.send_fds(
                    self._socket, [frame], [sock.fileno()]
                ) == len(frame)
            except OSError:
                is_sent = False
        if not is_sent:
            self._end()

    def received_socket(self) -> socket.socket:
        """That came with the frame which is being handled."""
        return socket.socket(fileno=self._descriptors.popleft())

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()

    def _end(self) -> None:
        if not self.is_closed:
            self.close()
            self._on_end()

    def _send_rest(self) -> None:
        if not self._unsent:
            return
        try:
            num_sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            self._end()
            return
        del self._unsent[:num_sent]
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            data = self._received()
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        for body in self._frames.feed(data):
            if self.is_closed:
                return
            self._on_frame(body)

    def _received(self) -> bytes:
        if not self._takes_sockets:
            return self._socket.recv(RECEIVE_BYTES)
        data, descriptors, _, _ = socket.recv_fds(self._socket, RECEIVE_BYTES, MAX_DESCRIPTORS)
        self._descriptors.extend(descriptors)
        return data
