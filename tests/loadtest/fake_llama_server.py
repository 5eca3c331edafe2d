"""A fake of llama.cpp's llama-server without a model: run as a program by tests.

It answers as tools/server in the sources of llama-cpp-python 0.3.36: /health says 503 while a
model is loaded; /completion streams chunked server-sent events, and the last one has the counts.
"""

import argparse
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def make_program(path: Path) -> Path:
    """This script, under the name of the program that it stands in for."""
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    path.chmod(0o755)
    return path


def log(line: str) -> None:
    """In one write: many threads do."""
    os.write(1, f"{line}\n".encode())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    num_looks = 0

    def do_GET(self) -> None:
        Handler.num_looks += 1
        is_ready = Handler.num_looks > 1
        log("ready" if is_ready else "loading")
        self._answer(200 if is_ready else 503, {"status": "ok"})

    def do_POST(self) -> None:
        assert self.path == "/completion"
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        log(f"request {json.dumps(request)}")
        if not request["prompt"]:
            self._answer(400, {"error": {"code": 400, "message": "no prompt"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(1, request["n_predict"]):  # the last one's text isn't a character yet
            self._tell({"content": "a", "stop": False, "tokens_predicted": number})
        self._chunk(b":\n\n")
        self._tell({"stop": True, "tokens_predicted": request["n_predict"]})
        self._chunk(b"")

    def _tell(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    def _answer(self, code: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 64
    daemon_threads = True


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in ("--model", "--host", "--ctx-size", "--threads", "--threads-batch"):
        parser.add_argument(option, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("-np", type=int, required=True)
    parser.add_argument("--cache-ram", type=int)
    parser.add_argument("--no-cache-prompt", action="store_true")
    parser.add_argument("--offline", action="store_true")
    args = parser.parse_args()
    if args.model.endswith("none.gguf"):
        sys.exit("no such model")
    Server((args.host, args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
