"""What every part of this room that starts processes needs: a port for them, and their end.

Knows: subprocess, sockets. Does not know: what runs.
"""

import socket
import subprocess
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_or_kill(process: "subprocess.Popen[Any]", patience_s: float) -> None:
    """For a process that was told to end: whoever hasn't by then is killed."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


ROOT = Path(__file__).resolve().parents[2]
