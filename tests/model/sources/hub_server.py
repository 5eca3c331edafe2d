"""A server that speaks a hub's protocol, for tests: model info, files with ranges, and faults."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" * 6 + "c0ff"
LARGE = (".gguf", ".safetensors")


class Hub:
    """One repository. Faults are attributes that a test sets."""

    def __init__(self, files: dict[str, bytes], repository: str = "org/tiny") -> None:
        self.files = files
        self.repository = repository
        self.commit = COMMIT  # as the hub names it
        self.token: str | None = None  # that callers must show
        self.is_gated = False
        self.cut_after: int | None = None  # bytes of each file, then the connection ends
        self.fail_after_cut = False  # and nothing is served any more
        self.wrong: set[str] = set()  # files that are sent with other bytes
        self.requests: list[tuple[str, str | None]] = []  # path and Range
        self.address = ""
        self.was_cut = False

    def info(self) -> bytes:
        siblings = [self._sibling(name, content) for name, content in self.files.items()]
        found = {"id": self.repository, "sha": self.commit, "siblings": siblings}
        return json.dumps(found | {"cardData": {"license": "mit"}}).encode()

    @staticmethod
    def _sibling(name: str, content: bytes) -> dict[str, object]:
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        found = {"rfilename": name, "size": len(content), "blobId": git}
        if not name.endswith(LARGE):
            return found
        sha256 = hashlib.sha256(content).hexdigest()
        return found | {"lfs": {"sha256": sha256, "size": len(content), "pointerSize": 1}}

    @property
    def fetched(self) -> list[str]:
        prefix = f"/{self.repository}/resolve/{COMMIT}/"
        return [path.removeprefix(prefix) for path, _ in self.requests if path.startswith(prefix)]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        hub = self.hub
        path = self.path.partition("?")[0]
        hub.requests.append((path, self.headers.get("Range")))
        if hub.was_cut and hub.fail_after_cut:
            return self._send(500, b"")
        if hub.token is not None and self.headers.get("authorization") != f"Bearer {hub.token}":
            code = "GatedRepo" if hub.is_gated else "RepoNotFound"
            return self._send(403 if hub.is_gated else 401, b"", {"X-Error-Code": code})
        if path.startswith("/api/models/"):
            if "/revision/" in path and path.rpartition("/")[2] not in ("main", COMMIT):
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            known = path.startswith(f"/api/models/{hub.repository}")
            missing = {"X-Error-Code": "RepoNotFound"}
            return self._send(200, hub.info()) if known else self._send(404, b"", missing)
        name = path.removeprefix(f"/{hub.repository}/resolve/{COMMIT}/")
        return self._send_file(name) if name in hub.files else self._send(404, b"")

    def _send_file(self, name: str) -> None:
        content = self.hub.files[name]
        if name in self.hub.wrong:
            content = bytes(len(content))
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        headers = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        rest = content[start:]
        if self.hub.cut_after is not None and len(rest) > self.hub.cut_after:
            self.hub.was_cut = True
            return self._send(206, rest, headers, self.hub.cut_after)
        return self._send(206 if start else 200, rest, headers if start else {})

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:cut])
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running_hub(files: dict[str, bytes]) -> Iterator[Hub]:
    hub = Hub(files)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def read_directory(path: Path) -> dict[str, bytes]:
    return {
        each.relative_to(path).as_posix(): each.read_bytes()
        for each in sorted(path.rglob("*"))
        if each.is_file()
    }
