"""Looks at the server's own numbers while a load runs: queue depth and running rows.

Knows: Prometheus' text format, HTTP. Does not know: the load.
"""

import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

LOOK_S = 0.25
_TIMEOUT_S = 2.0


class Look(NamedTuple):
    at_s: float  # since 1970
    queue_depth: float
    running_rows: float


def read_look(text: str, at_s: float) -> Look | None:
    """None if the page isn't a Quill server's."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in ("quill_queue_depth", "quill_running_rows"):
            found[name] = float(value)
    if len(found) < 2:
        return None
    return Look(at_s, found["quill_queue_depth"], found["quill_running_rows"])


def guess_url(address: str) -> str:
    """A server's metrics are at the port after its own, if nobody chose otherwise."""
    host, _, port = address.rpartition(":")
    return f"http://{host}:{int(port) + 1}/metrics" if port.isdecimal() else ""


class Watcher:
    """Looks from a thread of its own, from `with` to its end. Keeps going if the server doesn't."""

    def __init__(self, url: str | None) -> None:
        self.looks: list[Look] = []
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watcher":
        if self._url:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._url:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            look = self._look()
            if look:
                self.looks.append(look)
            self._stop.wait(LOOK_S)

    def _look(self) -> Look | None:
        assert self._url
        try:
            with urllib.request.urlopen(self._url, timeout=_TIMEOUT_S) as reply:
                return read_look(reply.read().decode("utf-8", "replace"), time.time())
        except (OSError, ValueError):
            return None


def write_looks(path: Path, looks: Sequence[Look]) -> None:
    text = "".join(
        f"{look.at_s:.3f},{look.queue_depth:g},{look.running_rows:g}\n" for look in looks
    )
    path.write_text(",".join(Look._fields) + "\n" + text, encoding="utf-8")
