"""Other people's servers, for as long as they are needed.

Knows: llama-cpp-python's HTTP server. Does not know: who asks it.
"""

import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quill.loadtest.environment.processes import ROOT, free_port, wait_or_kill
from quill.loadtest.errors import NoServerError

START_S = 60.0
ANSWER_S = 600.0


class LlamaServer:
    """Answers completions, one request at a time."""

    def __init__(self, port: int, pid: int) -> None:
        self._port = port
        self.pid = pid

    def complete(self, text: str, num_new: int) -> int:
        """The number of tokens in the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        body = json.dumps({"prompt": text, "max_tokens": num_new, "temperature": 0.0})
        try:
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            reply = json.loads(response.read())
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise NoServerError(f"llama-cpp-python's server answered {response.status}: {reply}")
        return int(reply["usage"]["completion_tokens"])


@contextmanager
def llama_server(python: Path, model: Path, num_threads: int, log: Path) -> Iterator[LlamaServer]:
    port = free_port()
    command = [str(python), "-m", "llama_cpp.server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--n_ctx", "1024"]
    command += ["--n_threads", str(num_threads), "--n_threads_batch", str(num_threads)]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=errors, stderr=errors, env=os.environ)
    try:
        _wait_for_port(port, process, log)
        yield LlamaServer(port, process.pid)
    finally:
        process.terminate()
        wait_or_kill(process, 10.0)


def _wait_for_port(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.2)
    last: Sequence[str] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
    raise NoServerError(f"llama-cpp-python's server didn't start: {' '.join(last)}")
