"""Closes a port of this process to everybody, below gRPC.

Knows: Linux's sockets. Does not know: gRPC, calls.

gRPC, when it stops, ends calls that it has taken in and nobody has looked at with CANCELLED. That
means that the caller has left, so nobody tries again, and no log has them. Whose connection ends
without an answer is told UNAVAILABLE by its own gRPC. So connections end first, then gRPC stops.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_FILES = Path("/proc/self/fd")


def stop_listening(port: int) -> None:
    """Nobody new gets in. gRPC keeps its descriptor, where nobody comes any more.

    Shutting the socket down instead would make gRPC write an error of its own into the log.
    """
    for descriptor, found in _sockets(port):
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            with socket.socket(socket.AF_UNIX) as nobody:
                nobody.setblocking(False)
                nobody.bind("")  # Linux makes up a name, which no file has
                nobody.listen()
                os.dup2(nobody.fileno(), descriptor, inheritable=False)


def hang_up(port: int) -> None:
    """On everybody who got in. What was written gets there."""
    for _, found in _sockets(port):
        with contextlib.suppress(OSError):  # its other end was quicker
            found.shutdown(socket.SHUT_RDWR)


def _sockets(port: int) -> Iterator[tuple[int, socket.socket]]:
    """Elsewhere than on Linux they can't be found."""
    for path in list(_FILES.iterdir()) if _FILES.is_dir() else ():
        if not path.is_socket():
            continue
        with contextlib.suppress(OSError):  # it was closed meanwhile
            number = int(path.name)
            with socket.socket(fileno=os.dup(number)) as found:
                is_inet = found.family in (socket.AF_INET, socket.AF_INET6)
                if is_inet and found.getsockname()[1] == port:
                    yield number, found
