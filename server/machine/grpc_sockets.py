"""Patch of grpcio: closes a gRPC server's port and connections before grpcio itself stops.

Knows: Linux's sockets of this process. Does not know: gRPC's objects, calls.

Why: `server.stop()` ends calls that grpcio has accepted and no handler has seen with CANCELLED,
which means that the caller left: no client retries it, and no log has it. A client whose connection
ends without a response gets UNAVAILABLE from its own gRPC, and retries. So first nobody new can
connect, then connections end, then grpcio stops. grpcio has no public way to do the first two, nor
to be given a listening socket of ours (grpc/grpc#19133 and #23760 are open).
When it can go: when tests/server/end_to_end/test_stopping.py passes with `server.stop()` alone, or
grpcio takes a listening socket. Without Linux nothing is done, and some callers get CANCELLED.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_FILES = Path("/proc/self/fd")


def stop_listening(port: int) -> None:
    """Puts a socket that nobody can reach in the place of each listening one: gRPC keeps its
    descriptor. Shutting the socket down instead would make gRPC log an error."""
    for descriptor, found in _sockets(port):
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            with socket.socket(socket.AF_UNIX) as unreachable:
                unreachable.setblocking(False)
                unreachable.bind("")  # Linux makes up a name without a file
                unreachable.listen()
                os.dup2(unreachable.fileno(), descriptor, inheritable=False)


def disconnect_all(port: int) -> None:
    """Ends the connections to a port. What was written before still arrives."""
    for _, found in _sockets(port):
        with contextlib.suppress(OSError):  # its other end was quicker
            found.shutdown(socket.SHUT_RDWR)


def _sockets(port: int) -> Iterator[tuple[int, socket.socket]]:
    """Without Linux none is found."""
    for path in list(_FILES.iterdir()) if _FILES.is_dir() else ():
        if not path.is_socket():
            continue
        with contextlib.suppress(OSError):  # it was closed meanwhile
            number = int(path.name)
            with socket.socket(fileno=os.dup(number)) as found:
                is_inet = found.family in (socket.AF_INET, socket.AF_INET6)
                if is_inet and found.getsockname()[1] == port:
                    yield number, found
