"""Samples the server's Prometheus metrics while a load runs.

Knows: HTTP, two gauges. Does not know: the load.
"""

import ssl
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quill.loadtest.environment.process import Sampler
from quill.loadtest.environment.server import METRICS_OFFSET, offset_port
from quill.server.client.access import Access
from quill.server.prometheus_text import Samples, read_samples

SAMPLE_S = 0.25
WAITING, RUNNING = "quill_requests_waiting", "quill_sequences_running"
_TIMEOUT_S = 2.0


class MetricsSample(NamedTuple):
    at_s: float  # since 1970
    queue_depth: float
    running_sequences: float


def fetch_metrics(
    url: str | None, access: Access | None = None, context: ssl.SSLContext | None = None
) -> Samples:
    """Of a server that has metrics. The API key is sent where nobody else can read it."""
    assert url is not None, "the server has metrics"
    request = urllib.request.Request(url)
    is_private = access is not None and access.may_show_key(request.host.rpartition(":")[0])
    if access is not None and (request.type == "https" or is_private):
        for name, value in access.metadata:
            request.add_header(name, value)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as reply:
        return read_samples(reply.read().decode("utf-8", "replace"))


def derive_url(address: str, scheme: str = "http") -> str:
    """Empty where the port is unknown."""
    if not address.rpartition(":")[2].isdecimal():
        return ""
    return f"{scheme}://{offset_port(address, METRICS_OFFSET)}/metrics"


def watch_server(url: str | None, access: Access | None = None) -> Sampler[MetricsSample]:
    """Takes no samples while the server's metrics can't be read."""
    access = access or Access()
    authority = None if access.ca is None else access.ca.decode("ascii", "ignore")
    context = ssl.create_default_context(cadata=authority)
    return Sampler(lambda: _sample(url, access, context), SAMPLE_S)


def _sample(url: str | None, access: Access, context: ssl.SSLContext) -> MetricsSample | None:
    if not url:
        return None
    try:
        return as_sample(fetch_metrics(url, access, context), time.time())
    except (OSError, ValueError):
        return None


def as_sample(metrics: Samples, at_s: float) -> MetricsSample | None:
    """None if the page isn't a Quill server's."""
    if WAITING not in metrics or RUNNING not in metrics:
        return None
    return MetricsSample(at_s, metrics.value(WAITING), metrics.value(RUNNING))


def write_samples(path: Path, samples: Sequence[MetricsSample]) -> None:
    text = "".join(
        f"{each.at_s:.3f},{each.queue_depth:g},{each.running_sequences:g}\n" for each in samples
    )
    path.write_text(",".join(MetricsSample._fields) + "\n" + text, encoding="utf-8")
