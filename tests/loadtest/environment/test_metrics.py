"""The server's own numbers."""

import threading

from quill.loadtest.environment.process import reserved_port
from quill.loadtest.environment.server import (
    MetricsSample,
    StartedServer,
    as_sample,
    derive_url,
    watch_server,
)
from quill.server.prometheus_text import read_samples

PAGE = """# HELP quill_requests_waiting Requests that wait
# TYPE quill_requests_waiting gauge
quill_requests_waiting 3.0
quill_sequences_running 8.0
quill_max_num_seqs 16.0
"""


def test_queue_depth_and_running_rows_are_read() -> None:
    assert as_sample(read_samples(PAGE), 5.0) == MetricsSample(5.0, 3.0, 8.0)


def test_somebody_elses_page_is_not_read() -> None:
    assert as_sample(read_samples("go_threads 7\n"), 5.0) is None


def test_watcher_looks_while_it_may(server: StartedServer) -> None:
    with watch_server(server.metrics_url) as watcher:
        seen = threading.Event()
        while not watcher.samples:
            assert not seen.wait(0.01)
    assert watcher.samples[0].queue_depth == 0


def test_watcher_without_a_server_sees_nothing_and_is_no_error() -> None:
    with reserved_port() as port, watch_server(f"http://127.0.0.1:{port}/metrics") as watcher:
        pass
    assert watcher.samples == []
    with watch_server(None) as watcher:
        pass
    assert watcher.samples == []


def test_metrics_are_guessed_at_the_next_port() -> None:
    assert derive_url("127.0.0.1:50051") == "http://127.0.0.1:50052/metrics"
    assert derive_url("[::1]:1", "https") == "https://[::1]:2/metrics"
    assert derive_url("somewhere") == ""
