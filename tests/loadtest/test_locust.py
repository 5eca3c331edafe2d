"""Locust itself, always in processes of its own: it patches the standard library."""

import ast
import json
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.crowd import Plan
from loadtest.errors import LoadtestError
from loadtest.locust_process import LOCUSTFILE, Load, run_locust
from loadtest.own_server import OwnServer
from loadtest.processes import free_port
from loadtest.records import RequestRecord, read_records

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0

# What somebody else's locustfile looks like.
MINE = """
from locust import task
from loadtest.asking import Ask
from loadtest.user import StreamUser
from protos import generation_pb2 as pb

class Mine(StreamUser):
    @task
    def ask(self):
        ids = pb.TokenIds(ids=[1, 2, 3])
        self.generate(Ask(pb.GenerateRequest(prompt_ids=ids, max_new_tokens=5)), "good")
        self.generate(Ask(pb.GenerateRequest()), "bad")
        self.environment.runner.quit()
"""


def run_load(server: OwnServer, directory: Path, plan: Plan, **more: Any) -> list[RequestRecord]:
    records = directory / "requests.csv"
    told: list[dict[str, Any]] = []
    load = Load(plan, server.address, records, directory / "locust.log", **more)
    run_locust(load, told.append)
    found = read_records(records)
    assert told[-1]["requests"] == len(found)
    assert told[-1]["tokens"] == sum(record.num_tokens for record in found)
    return found


def test_only_locusts_own_files_import_it() -> None:
    found = set()
    for path in sorted(ROOT.glob("*/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if {name.partition(".")[0] for name in names} & {"locust", "gevent"}:
                found.add(f"{path.parent.name}/{path.name}")
    assert found == {f"loadtest/{name}.py" for name in ("collecting", "locustfile", "user")}


def test_closed_loop_asks_every_request_once(server: OwnServer, tmp_path: Path) -> None:
    records = run_load(server, tmp_path, Plan(max_requests=30, max_new_tokens=6), num_users=4)
    assert sorted(record.index for record in records) == list(range(30))
    assert {record.status for record in records} == {"OK"}
    assert all(0 < record.num_tokens <= 6 for record in records)


def test_open_loop_starts_requests_when_they_are_due(server: OwnServer, tmp_path: Path) -> None:
    plan = Plan(scenario="slow-readers", rate=20.0, duration_s=1.5, max_new_tokens=6)
    records = run_load(server, tmp_path, plan)
    assert len(records) > 10
    starts = sorted(record.intended_at_s for record in records)
    ends = [record.intended_at_s + record.total_ms / 1000 for record in records]
    # It doesn't wait for answers: some begin while others run.
    assert any(start < end for start, end in zip(starts[1:], ends, strict=False))
    assert starts[-1] - starts[0] < 1.5
    assert {record.offered_rate for record in records} == {20.0}
    assert all(record.late_ms >= 0 for record in records)


def test_one_master_and_two_workers_make_one_file(server: OwnServer, tmp_path: Path) -> None:
    plan = Plan(scenario="unfriendly", max_requests=30, max_new_tokens=4)
    records = run_load(server, tmp_path, plan, num_users=4, num_workers=2)
    assert sorted(record.index for record in records) == list(range(30))
    assert [record for record in records if not record.ok] == []
    log = (tmp_path / "locust.log").read_text()
    assert "(index 0)" in log
    assert "(index 1)" in log


def test_locust_that_fails_is_an_error_that_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "locust.log"
    load = Load(Plan(scenario="none"), "127.0.0.1:1", tmp_path / "requests.csv", log)
    with pytest.raises(LoadtestError, match=r"ended with code 2; .*locust\.log says why"):
        run_locust(load, lambda told: None)
    assert "invalid choice" in log.read_text()


def test_statistics_have_a_name_for_each_measure_and_errors_their_status(
    server: OwnServer, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    command = [sys.executable, "-m", "locust", "-f", str(mine), "--headless", "--users", "1"]
    done = subprocess.run(
        [*command, "--only-summary", "--host", server.address, "--json"],
        capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    kinds = {(entry["method"], entry["name"]): entry for entry in json.loads(done.stdout)}
    measured = ("stream", "first token", "token gap", "per token", "tokens", "finish LENGTH")
    assert set(kinds) == {*((name, "good") for name in measured), ("stream", "bad")}
    assert kinds["token gap", "good"]["num_requests"] == 4
    assert kinds["tokens", "good"]["max_response_time"] == 5
    assert kinds["stream", "bad"]["num_failures"] == 1
    assert done.returncode == 1
    assert "INVALID_ARGUMENT" in done.stderr


@contextmanager
def web_page(server: OwnServer, log: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", server.address]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, "--web-host", "127.0.0.1", "--web-port", str(port)],
            stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, cwd=ROOT,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def get(url: str, wanted: str = "", form: dict[str, str] | None = None) -> str:
    """Asks until the answer has what is wanted."""
    data = urllib.parse.urlencode(form).encode() if form else None
    pause = threading.Event()
    for _ in range(int(TIMEOUT_S / 0.05)):
        try:
            with urllib.request.urlopen(url, data, timeout=TIMEOUT_S) as reply:
                text: str = reply.read().decode()
        except OSError:
            text = ""
        if text and wanted in text:
            return text
        pause.wait(0.05)
    raise AssertionError(f"{url} never said {wanted!r}: {text[-500:]}")


def test_locusts_own_page_starts_a_load_and_shows_it(server: OwnServer, tmp_path: Path) -> None:
    with web_page(server, tmp_path / "locust.log") as url:
        assert "scenario" in get(f"{url}/")
        form = {"user_count": "2", "spawn_rate": "2", "host": f"http://{server.address}"}
        form |= {"scenario": "long-answer", "requests": "6"}
        assert json.loads(get(f"{url}/swarm", form=form))["success"]
        stats = json.loads(get(f"{url}/stats/requests", wanted='"state": "stopped"'))
    shown = {(entry["method"], entry["name"]): entry["num_requests"] for entry in stats["stats"]}
    assert shown["stream", "long-answer"] == shown["first token", "long-answer"] == 6
    assert stats["errors"] == []
