"""Every alert fires: in promtool, and many by servers in trouble that a real Prometheus scrapes.

promtool and Prometheus come with Debian's package `prometheus`; without it the tests are skipped.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from quill.server.client.async_client import AsyncClient
from quill.server.client.errors import CallError
from tests.server.authority import Authority, write
from tests.server.faults import Faults
from tests.server.process import NEVER, ServerProcess, server_process, wait_until
from tests.server.tiny_bundle import TinyBundle

RULES = Path(__file__).parents[3] / "server/deploy/kubernetes/monitoring/rules.yaml"
PROMPT = [5, 6, 7]
FIRING_S = 120.0
OK = 'quill_requests_total{pod="a", outcome="OK"}'
# For each alert what is scraped once a minute: all is well for 20 minutes, and nothing afterwards.
CASES = {
    "QuillUnavailable": {'quill_serving{pod="a"}': "1x20 0x40"},
    "QuillNotScraped": {'up{job="quill", pod="a"}': "1x20 0x40"},
    "QuillNotServing": {'quill_serving{pod="a"}': "1x20 0x40"},
    "QuillHangs": {'quill_health_problem{pod="a", problem="hanging"}': "0x20 1x40"},
    "QuillStepsFail": {'quill_health_problem{pod="a", problem="failing"}': "0x20 1x40"},
    "QuillCallsUnread": {'quill_oldest_unread_call_seconds{pod="a"}': "0x20 3x40"},
    "QuillRestarts": {'process_start_time_seconds{job="quill", pod="a"}': "1x20 2x4 3x40"},
    "QuillInternalErrors": {'quill_requests_total{pod="a", outcome="INTERNAL"}': "0x20 1+1x40"},
    "QuillDeadlinesExceeded": {
        OK: "0+90x60",
        'quill_requests_total{pod="a", outcome="DEADLINE_EXCEEDED"}': "0x20 10+10x40",
    },
    "QuillRejectsCalls": {
        OK: "0+90x60",
        'quill_rejections_total{pod="a", reason="queue_full"}': "0x20 10+10x40",
    },
    "QuillKeysLimited": {
        OK: "0+90x60",
        'quill_rejections_total{pod="a", reason="key_max_concurrent"}': "0x20 30+30x40",
    },
    "QuillQueueGrows": {  # one API key can't have more than half of the default queue
        'quill_requests_waiting{pod="a"}': "0x20 128x40",
        'quill_max_queue{pod="a"}': "256x60",
    },
    "QuillTimeToFirstTokenHigh": {
        'quill_time_to_first_token_seconds_bucket{pod="a", le="5"}': "0+8x20 168+0x40",
        'quill_time_to_first_token_seconds_bucket{pod="a", le="10"}': "0+8x60",
        'quill_time_to_first_token_seconds_bucket{pod="a", le="+Inf"}': "0+8x60",
    },
    "QuillInterTokenLatencyHigh": {
        'quill_inter_token_latency_seconds_bucket{pod="a", le="0.5"}': "0+8x20 168+0x40",
        'quill_inter_token_latency_seconds_bucket{pod="a", le="1"}': "0+8x60",
        'quill_inter_token_latency_seconds_bucket{pod="a", le="+Inf"}': "0+8x60",
    },
    "QuillPreempts": {'quill_preemptions_total{pod="a"}': "0x20 12+12x40"},
    "QuillCertificateExpires": {  # promtool's time begins at 0
        'quill_certificate_expiry_timestamp_seconds{pod="a"}': "1000000000x20 864000x40"
    },
}
ENGINE_RESTARTS = {'quill_engine_restarts_total{pod="a"}': "0x20 1x4 2x40"}


def rules() -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load(RULES.read_text())["spec"]
    return spec


def test_every_alert_has_a_case() -> None:
    alerts = [rule["alert"] for group in rules()["groups"] for rule in group["rules"]]
    assert sorted(alerts) == sorted(CASES)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
@pytest.mark.parametrize(
    ("alert", "series"),
    [*CASES.items(), pytest.param("QuillRestarts", ENGINE_RESTARTS, id="engine-restarts")],
)
def test_alert_fires_when_it_should(alert: str, series: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules()))
    firing = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    one = [{"labels": "{}", "value": 1}]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": firing, "eval_time": f"{minute}m", "exp_samples": samples}
            for minute, samples in ((19, []), (40, one))
        ],
    }
    content = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(content))
    command = ["promtool", "test", "rules", str(tmp_path / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """Scrapes every second. Minutes of the rules are seconds, so that nobody waits for hours."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = free_port()
        self._targets: list[dict[str, Any]] = []
        text = re.sub(r"\[(\d+)m\]", r"[\1s]", yaml.safe_dump(rules()))
        (directory / "rules.yml").write_text(re.sub(r"for: (\d+)m", r"for: \1s", text))

    def add(self, pod: str, port: int, scheme: str = "http") -> None:
        labels = {"pod": pod, "job": "quill", "__scheme__": scheme}
        self._targets.append({"targets": [f"127.0.0.1:{port}"], "labels": labels})
        (self._directory / "targets.yml").write_text(yaml.safe_dump(self._targets))

    @contextmanager
    def running(self) -> Iterator[None]:
        scrape = {
            "job_name": "quill",
            "file_sd_configs": [{"files": ["targets.yml"], "refresh_interval": "1s"}],
            "tls_config": {"insecure_skip_verify": True},
        }
        content = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [scrape],
        }
        (self._directory / "prometheus.yml").write_text(yaml.safe_dump(content))
        options = ["--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        options.append(f"--web.listen-address=127.0.0.1:{self._port}")
        with (self._directory / "log").open("w") as log:
            process = subprocess.Popen(
                ["prometheus", *options], cwd=self._directory, stdout=log, stderr=log
            )
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def firing(self) -> set[tuple[str, str]]:
        """Alerts and their pods."""
        try:
            url = f"http://127.0.0.1:{self._port}/api/v1/alerts"
            with urllib.request.urlopen(url, timeout=10) as reply:
                alerts = json.load(reply)["data"]["alerts"]
        except OSError:  # it starts
            return set()
        labels = [each["labels"] for each in alerts if each["state"] == "firing"]
        return {(each["alertname"], each.get("pod", "")) for each in labels}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def calling(num_callers: int, call: Callable[[], Awaitable[Any]]) -> Iterator[None]:
    """So many callers, each with one call after another, whatever comes of them."""
    stop = threading.Event()

    async def caller() -> None:
        while not stop.is_set():
            with contextlib.suppress(CallError):
                await call()
            await asyncio.sleep(0)

    async def callers() -> None:
        await asyncio.gather(*(caller() for _ in range(num_callers)))

    thread = threading.Thread(target=lambda: asyncio.run(callers()))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def load(
    server: ServerProcess, num_callers: int, max_new_tokens: int, timeout_s: float
) -> Iterator[None]:
    clients: list[AsyncClient] = []

    async def call() -> None:
        if not clients:
            clients.append(AsyncClient(server.address, NEVER))
        await clients[0].generate(PROMPT, max_new_tokens=max_new_tokens, timeout_s=timeout_s)

    with calling(num_callers, call):
        yield


def restart_engine(server: ServerProcess, number: int) -> None:
    """Kills it, and waits until it was started again for so many times in all."""
    os.kill(server.engine_pid, signal.SIGKILL)
    name = "quill_engine_restarts_total"
    wait_until(lambda: server.metric(name) == number and server.metric("quill_serving") == 1, name)


@pytest.mark.alerts
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus")
def test_servers_in_trouble_raise_alerts(tiny_bundle: TinyBundle, tmp_path: Path) -> None:
    """One server for each kind of trouble, one that is well."""
    prometheus = Prometheus(tmp_path)
    with ExitStack() as stack:

        def start(pod: str, *options: str, fault: str | None = None) -> ServerProcess:
            (tmp_path / pod).mkdir(exist_ok=True)
            faults = Faults(tmp_path / pod)
            port = free_port()
            prometheus.add(pod, port, "https" if "--tls-cert" in options else "http")
            server = stack.enter_context(
                server_process(
                    *(tiny_bundle.directory, tmp_path / f"{pod}.log", "--metrics-port", str(port)),
                    *("--http-port", "off", *options),
                    environment=faults.environment,
                )
            )
            if fault == "hang":
                faults.hang()
            elif fault is not None:
                faults.start(fault)
            return server

        tls = write(tmp_path, Authority("ours").sign("localhost"))
        servers = {
            "well": start("well"),
            "busy": start("busy"),  # the queue is the default one
            "late": start("late", fault="slow"),
            "failing": start("failing", fault="raise"),
            "hanging": start("hanging", "--watchdog", "0.5", fault="hang"),
            "gone": start("gone"),
            "restarting": start("restarting"),
        }
        start("expiring", "--tls-cert", str(tls.cert), "--tls-key", str(tls.key))
        stack.enter_context(prometheus.running())
        stack.enter_context(load(servers["well"], 1, 4, 60))
        stack.enter_context(load(servers["busy"], 120, 100, 60))
        stack.enter_context(load(servers["late"], 2, 100, 0.015))
        stack.enter_context(load(servers["failing"], 1, 4, 60))
        stack.enter_context(load(servers["hanging"], 1, 4, 5))
        servers["gone"].process.kill()
        wait_until(lambda: ("QuillNotScraped", "gone") in prometheus.firing(), "a scrape", FIRING_S)
        restart_engine(servers["restarting"], 1)
        restart_engine(servers["restarting"], 2)
        expected = {
            ("QuillQueueGrows", "busy"),
            ("QuillDeadlinesExceeded", "late"),
            ("QuillInternalErrors", "failing"),
            ("QuillStepsFail", "failing"),
            ("QuillNotServing", "failing"),
            ("QuillHangs", "hanging"),
            ("QuillRestarts", "restarting"),
            ("QuillNotScraped", "gone"),
            ("QuillCertificateExpires", "expiring"),
        }
        seen: set[tuple[str, str]] = set()

        def all_fired() -> bool:
            seen.update(prometheus.firing())
            return expected <= seen

        with contextlib.suppress(AssertionError):
            wait_until(all_fired, "every alert", FIRING_S)
        assert expected - seen == set(), "never fired"
        assert not [alert for alert, pod in seen if pod == "well"]
