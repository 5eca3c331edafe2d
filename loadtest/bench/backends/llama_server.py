"""llama.cpp's own server as a backend, with streaming clients over HTTP.

    python -m …backends.llama_server PROGRAM MODEL.gguf THREADS USERS CONTEXT [shared]

Knows: `llama-server` of `make peers`, its options, its server-sent events.
Does not know: other backends.
"""

import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from quill.loadtest.bench.backends.protocol import BackendInfo, serve, size_of
from quill.loadtest.environment.process import last_line, peak_bytes_of, reserved_port, stop_process
from quill.loadtest.errors import BackendError
from quill.loadtest.workload.closed_loop import ANSWER_TIMEOUT_S, Streamed, run_load

HOST = "127.0.0.1"
START_S = 120.0
_POLL_S = 0.1


class LlamaConfig(NamedTuple):
    program: Path
    model: Path
    num_threads: int
    num_users: int
    context: int  # of each user
    shares_prefix: bool


def options(config: LlamaConfig, port: int) -> list[str]:
    """Its defaults but for its size: a slot with enough context for each user.

    Its prompt cache is on by default. Where prompts share nothing, the cache would only cost time,
    and repeated prompts would be answered from it, so it is turned off.
    """
    given = ["--model", str(config.model), "--host", HOST, "--port", str(port), "--offline"]
    given += ["-np", str(config.num_users), "--ctx-size", str(config.num_users * config.context)]
    given += ["--threads", str(config.num_threads), "--threads-batch", str(config.num_threads)]
    return given + ([] if config.shares_prefix else ["--no-cache-prompt", "--cache-ram", "0"])


def request(ids: Sequence[int], num_new: int, temperature: float) -> dict[str, Any]:
    """Overrides all sampling defaults; the last event comes without an echo of the prompt."""
    return {
        "prompt": list(ids),
        "n_predict": num_new,
        "stream": True,
        "ignore_eos": True,
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "response_fields": ["stop", "tokens_predicted"],
    }


def read_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Server-sent events of one line of JSON each, without comments such as pings."""
    for line in lines:
        field, _, content = line.partition(b":")
        if field == b"data":
            yield json.loads(content)


def read_answer(lines: Iterable[bytes], start_s: float) -> Streamed:
    """The last event counts the tokens: a token that ends no character has no event of its own."""
    first_s: float | None = None
    for event in read_events(lines):
        if "error" in event:
            raise BackendError(f"llama-server ended a stream: {event['error']}")
        if first_s is None:
            first_s = time.perf_counter() - start_s
        if event["stop"]:
            return Streamed(event["tokens_predicted"], first_s)
    raise BackendError("llama-server ended a stream without its last event")


class LlamaServer:
    def __init__(self, config: LlamaConfig, port: int, pid: int) -> None:
        kind, size = config.model.stem.upper(), size_of(config.model)
        self.info = BackendInfo("llama-server", kind, "llama.cpp", size)
        self._port, self._pid = port, pid

    def load(
        self,
        prompts: Sequence[Sequence[int]],
        num_users: int,
        num_new: int,
        duration_s: float,
        temperature: float = 0.0,
    ) -> dict[str, Any]:
        def stream(ids: Sequence[int]) -> Streamed:
            return self.stream(request(ids, num_new, temperature))

        return run_load(stream, prompts, num_users, num_new, duration_s)

    def memory(self) -> int:
        return peak_bytes_of(self._pid)

    def stream(self, asked: dict[str, Any]) -> Streamed:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=ANSWER_TIMEOUT_S)
        try:
            body, headers = json.dumps(asked), {"Content-Type": "application/json"}
            start_s = time.perf_counter()
            connection.request("POST", "/completion", body, headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                text = response.read().decode(errors="replace")[:200]
                raise BackendError(f"llama-server answered {response.status}: {text}")
            return read_answer(response, start_s)
        except (OSError, http.client.HTTPException) as error:
            raise BackendError(f"llama-server broke off: {error!r}") from error
        finally:
            connection.close()


@contextmanager
def llama_server(config: LlamaConfig, log: Path) -> Iterator[LlamaServer]:
    with reserved_port() as port:
        command = [str(config.program), *options(config, port)]
        with log.open("wb") as errors:
            process = subprocess.Popen(command, stdout=errors, stderr=errors, process_group=0)
        try:
            _wait_until_ready(process, port, log)
            yield LlamaServer(config, port, process.pid)
        finally:
            process.terminate()
            stop_process(process, 10.0)


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    """It listens before its model is loaded, and reports so."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        if _is_ready(port):
            return
        time.sleep(_POLL_S)
    raise BackendError(f"llama-server didn't start: {last_line(log)}")


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=_POLL_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def main(program: str, model: str, threads: str, users: str, context: str, *rest: str) -> None:
    config = LlamaConfig(
        Path(program), Path(model), int(threads), int(users), int(context), "shared" in rest
    )
    with (
        tempfile.TemporaryDirectory() as logs,
        llama_server(config, Path(logs, "log")) as backend,
    ):
        serve(backend)


if __name__ == "__main__":
    main(*sys.argv[1:])
