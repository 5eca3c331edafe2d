"""The server's own numbers."""

import threading

from quill.loadtest.environment.own_server import OwnServer
from quill.loadtest.environment.processes import free_port
from quill.loadtest.environment.server_metrics import (
    MetricsSample,
    derive_url,
    read_sample,
    watch_server,
)

PAGE = """# HELP quill_requests_waiting Requests that wait
# TYPE quill_requests_waiting gauge
quill_requests_waiting 3.0
quill_sequences_running 8.0
quill_max_num_seqs 16.0
"""


def test_queue_depth_and_running_rows_are_read() -> None:
    assert read_sample(PAGE, 5.0) == MetricsSample(5.0, 3.0, 8.0)


def test_somebody_elses_page_is_not_read() -> None:
    assert read_sample("go_threads 7\n", 5.0) is None


def test_watcher_looks_while_it_may(server: OwnServer) -> None:
    with watch_server(server.metrics_url) as watcher:
        seen = threading.Event()
        while not watcher.samples:
            assert not seen.wait(0.01)
    assert watcher.samples[0].queue_depth == 0


def test_watcher_without_a_server_sees_nothing_and_is_no_error() -> None:
    with watch_server(f"http://127.0.0.1:{free_port()}/metrics") as watcher:
        pass
    assert watcher.samples == []
    with watch_server(None) as watcher:
        pass
    assert watcher.samples == []


def test_metrics_are_guessed_at_the_next_port() -> None:
    assert derive_url("127.0.0.1:50051") == "http://127.0.0.1:50052/metrics"
    assert derive_url("[::1]:1", "https") == "https://[::1]:2/metrics"
    assert derive_url("somewhere") == ""
