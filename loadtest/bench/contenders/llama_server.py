"""llama.cpp's own server as a contender, asked by streams over HTTP.

Knows: `llama-server` of `make peers`, its options, its server-sent events.
Does not know: who else is measured.
"""

import http.client
import json
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quill.loadtest.bench.contenders.serving import Load, Serving, Streamed
from quill.loadtest.environment.processes import free_port, wait_or_kill
from quill.loadtest.errors import ContenderError

HOST = "127.0.0.1"
START_S = 120.0
ANSWER_S = 600.0
_LOOK_S = 0.1


def options(model: Path, port: int, load: Load) -> list[str]:
    """As it comes but for its size: a slot for each user, and the context that each needs.

    It keeps what it read for the next prompts by itself. Without anything shared that would only
    cost, and prompts that come again would be answered from there, so it is told not to.
    """
    given = ["--model", str(model), "--host", HOST, "--port", str(port), "--offline"]
    given += ["-np", str(load.num_users), "--ctx-size", str(load.num_users * load.context)]
    given += ["--threads", str(load.num_threads), "--threads-batch", str(load.num_threads)]
    return given + ([] if load.num_shared else ["--no-cache-prompt", "--cache-ram", "0"])


def request(ids: Sequence[int], load: Load) -> dict[str, Any]:
    """Nothing is left to its own defaults, which cut off; the end comes without an echo."""
    return {
        "prompt": list(ids),
        "n_predict": load.num_new,
        "stream": True,
        "ignore_eos": True,
        "temperature": load.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "response_fields": ["stop", "tokens_predicted"],
    }


def read_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Server-sent events of one line of JSON each. Others, such as pings, are comments."""
    for line in lines:
        field, _, content = line.partition(b":")
        if field == b"data":
            yield json.loads(content)


def read_answer(lines: Iterable[bytes], asked_s: float) -> Streamed:
    """Its last event counts the tokens: one that ends no character comes with a later one."""
    first_s: float | None = None
    for event in read_events(lines):
        if "error" in event:
            raise ContenderError(f"llama-server ended a stream: {event['error']}")
        if first_s is None:
            first_s = time.perf_counter() - asked_s
        if event["stop"]:
            return Streamed(event["tokens_predicted"], first_s)
    raise ContenderError("llama-server ended a stream without its last event")


@contextmanager
def llama_server(program: Path, model: Path, load: Load, log: Path) -> Iterator[Serving]:
    port = free_port()
    command = [str(program), *options(model, port, load)]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=errors, stderr=errors, process_group=0)
    try:
        _wait_until_ready(process, port, log)
        kind = model.stem.upper()
        yield Serving("llama-server", kind, process.pid, lambda ids: _stream(port, ids, load))
    finally:
        process.terminate()
        wait_or_kill(process, 10.0)


def _stream(port: int, ids: Sequence[int], load: Load) -> Streamed:
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_S)
    try:
        body, headers = json.dumps(request(ids, load)), {"Content-Type": "application/json"}
        asked_s = time.perf_counter()
        connection.request("POST", "/completion", body, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            said = response.read().decode(errors="replace")[:200]
            raise ContenderError(f"llama-server answered {response.status}: {said}")
        return read_answer(response, asked_s)
    except (OSError, http.client.HTTPException) as error:
        raise ContenderError(f"llama-server broke off: {error!r}") from error
    finally:
        connection.close()


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    """It listens before its model is loaded, and says so."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        if _is_ready(port):
            return
        time.sleep(_LOOK_S)
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise ContenderError(f"llama-server didn't start: {' '.join(last) or 'no word'}")


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=_LOOK_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
