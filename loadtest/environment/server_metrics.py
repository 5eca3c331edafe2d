"""Looks at the server's own numbers while a load runs: queue depth and running rows.

Knows: Prometheus' text format, HTTP. Does not know: the load.
"""

import re
import ssl
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quill.loadtest.environment.watcher import Watcher
from quill.server.client.access import Access

LOOK_S = 0.25
_TIMEOUT_S = 2.0
_TOKENS = re.compile(r'^quill_tokens_total\{kind="(\w+)"\} (\S+)$', re.MULTILINE)


class MetricsSample(NamedTuple):
    at_s: float  # since 1970
    queue_depth: float
    running_rows: float


def read_sample(text: str, at_s: float) -> MetricsSample | None:
    """None if the page isn't a Quill server's."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in ("quill_requests_waiting", "quill_sequences_running"):
            found[name] = float(value)
    if len(found) < 2:
        return None
    return MetricsSample(at_s, found["quill_requests_waiting"], found["quill_sequences_running"])


def read_tokens(url: str | None) -> dict[str, float]:
    """What a server of our own has counted until now: `prompt`, `cached`, `generated`."""
    assert url is not None, "it was told to have metrics"
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
        page = reply.read().decode("utf-8", "replace")
    counted = dict.fromkeys(("prompt", "cached", "generated"), 0.0)
    return counted | {kind: float(value) for kind, value in _TOKENS.findall(page)}


def derive_url(address: str, scheme: str = "http") -> str:
    """A server's metrics are at the port after its own, if nobody chose otherwise."""
    host, _, port = address.rpartition(":")
    return f"{scheme}://{host}:{int(port) + 1}/metrics" if port.isdecimal() else ""


def watch_server(url: str | None, access: Access | None = None) -> Watcher[MetricsSample]:
    """Keeps going if the server doesn't. Without a page there is nothing to be seen."""
    access = access or Access()
    authority = None if access.ca is None else access.ca.decode("ascii", "ignore")
    context = ssl.create_default_context(cadata=authority)
    return Watcher(lambda: _look(url, access, context), LOOK_S)


def _look(url: str | None, access: Access, context: ssl.SSLContext) -> MetricsSample | None:
    if not url:
        return None
    try:
        request = urllib.request.Request(url)
        if request.type == "https" or access.may_show_key(request.host.rpartition(":")[0]):
            for name, value in access.metadata:
                request.add_header(name, value)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as reply:
            return read_sample(reply.read().decode("utf-8", "replace"), time.time())
    except (OSError, ValueError):
        return None


def write_samples(path: Path, samples: Sequence[MetricsSample]) -> None:
    text = "".join(
        f"{look.at_s:.3f},{look.queue_depth:g},{look.running_rows:g}\n" for look in samples
    )
    path.write_text(",".join(MetricsSample._fields) + "\n" + text, encoding="utf-8")
