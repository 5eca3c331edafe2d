"""An engine's process without an engine, for tests of those that start and end it.

Knows: how the real one (server/process/engine_main.py) answers. Does not know: bundles, requests.
A file `loading` in the bundle's directory means that it loads until it is told to end, and
`damaged` that the bundle can't be served.
"""

import os
import socket
import sys

import msgspec

from quill.server.process.control import Failed, Ready, control_frame, read_start


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    directory, _ = read_start(control)
    if (directory / "loading").exists():
        control.recv(1)
        return
    if (directory / "damaged").exists():
        control.sendall(control_frame(Failed("damaged")))
        return
    control.sendall(control_frame(Ready(os.getpid(), msgspec.Raw(msgspec.msgpack.encode(None)))))
    while socket.recv_fds(control, 1, 1)[1]:
        pass


if __name__ == "__main__":
    main()
