"""A real server for clients that aren't ours, with a key for each of them.

They run in an environment of their own (`make test-clients`), so nothing of ours is imported here:
the server is another environment's program. Elsewhere these tests skip, and say why.
"""

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv/bin/python"
BUNDLE = "QUILL_CLIENTS_BUNDLE"  # a directory; the default model if it isn't set
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Server:
    address: str  # gRPC's
    http: str
    model: str
    key: str
    slow_key: str  # two calls at once, and then one in five seconds
    log: Path

    @property
    def base_url(self) -> str:
        return f"{self.http}/v1"

    def lines(self) -> list[dict[str, object]]:
        """What the log says of calls."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line[:1] == "{"]
        return [line for line in lines if line["message"] == "request"]

    def ask(self, path: str, body: dict[str, object]) -> Any:
        return _ask(self.http, self.key, path, body)

    def ours(self, code: str, *arguments: str) -> str:
        """What a few lines of Python print that use Quill's own client."""
        command = [str(PYTHON), "-c", code, self.address, self.key, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        return done.stdout


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("clients")
    keys, log = directory / "keys.json", directory / "log"
    key, slow_key = _add_key(keys, "alice"), _add_key(keys, "bob", "--requests-per-minute", "12")
    bundle = [os.environ[BUNDLE]] if BUNDLE in os.environ else []
    options = ["--port", "0", "--metrics-port", "off", "--log-format", "json", "--api-keys"]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [str(PYTHON), "-m", "quill", "serve", *bundle, *options, str(keys)],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=ROOT,
        )
    try:
        ready = _wait_until_ready(process, log)
        http = str(ready["http"])
        model = _ask(http, key, "/v1/models")["data"][0]["id"]
        yield Server(str(ready["address"]), http, model, key, slow_key, log)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@pytest.fixture
def embedder(server: Server) -> Server:
    """The same, if its bundle has vectors."""
    try:
        _ask(server.http, server.key, "/v1/embeddings", {"input": "x"})
    except urllib.error.HTTPError as error:
        pytest.skip(json.load(error)["error"]["message"])
    return server


def _add_key(keys: Path, name: str, *limits: str) -> str:
    command = [str(PYTHON), "-m", "quill", "keys", "add", str(keys), name, *limits]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


def _wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> dict[str, object]:
    with log.open() as lines:
        text = ""
        while process.poll() is None:
            text += lines.readline()
            if not text.endswith("\n"):
                continue
            if '"serving at' in text:
                ready: dict[str, object] = json.loads(text)
                return ready
            text = ""
    raise AssertionError(f"the server ended: {log.read_text()}")


def _ask(http: str, key: str, path: str, body: dict[str, object] | None = None) -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{http}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        return json.load(reply)
