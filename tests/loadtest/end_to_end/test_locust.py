"""Locust itself, always in processes of its own: it patches the standard library."""

import ast
import json
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from quill.loadtest.environment.process import reserved_port
from quill.loadtest.environment.server import StartedServer
from quill.loadtest.errors import LoadtestError
from quill.loadtest.run.locust_process import LOCUSTFILE, Load, run_locust
from quill.loadtest.workload.records import RequestRecord, read_records
from quill.loadtest.workload.schedule import Plan

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60.0

# What somebody else's locustfile looks like.
MINE = """
from locust import task
from quill.loadtest.workload.request import LoadRequest
from quill.loadtest.locust_users.stream_user import {user}
from quill.protos import generation_pb2 as pb

class Mine({user}):
    @task
    def load(self):
        ids = pb.TokenIds(ids=[1, 2, 3])
        self.generate(LoadRequest(pb.GenerateRequest(prompt_ids=ids, max_new_tokens=5)), "good")
        self.generate(LoadRequest(pb.GenerateRequest()), "bad")
        self.environment.runner.quit()
"""


def run_load(
    server: StartedServer, directory: Path, plan: Plan, **more: Any
) -> list[RequestRecord]:
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
    for room in ("model", "export", "server", "protos", "loadtest"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                if {name.partition(".")[0] for name in names} & {"locust", "gevent"}:
                    found.add(path.relative_to(ROOT))
    own = (ROOT / "loadtest" / "locust_users").glob("[!_]*.py")
    assert found == {Path("loadtest/locustfile.py"), *(path.relative_to(ROOT) for path in own)}


def test_closed_loop_asks_every_request_once(server: StartedServer, tmp_path: Path) -> None:
    records = run_load(server, tmp_path, Plan(max_requests=30, max_new_tokens=6), num_users=4)
    assert sorted(record.index for record in records) == list(range(30))
    assert {record.status for record in records} == {"OK"}
    assert all(0 < record.num_tokens <= 6 for record in records)


def test_open_loop_starts_requests_when_they_are_due(server: StartedServer, tmp_path: Path) -> None:
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


def test_one_master_and_two_workers_make_one_file(server: StartedServer, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("user", "method"), [("StreamUser", "stream"), ("HttpStreamUser", "http stream")]
)
def test_only_streams_are_requests_and_errors_have_their_status(
    user: str, method: str, server: StartedServer, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE.format(user=user))
    address = server.address_for(method.partition(" ")[0])
    command = [sys.executable, "-m", "locust", "-f", str(mine), "--headless", "--users", "1"]
    done = subprocess.run(
        [*command, "--only-summary", "--host", address, "--json"],
        capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    kinds = {(entry["method"], entry["name"]): entry for entry in json.loads(done.stdout)}
    assert set(kinds) == {(method, "good"), (method, "bad")}
    assert kinds[method, "good"]["num_requests"] == 1
    assert kinds[method, "bad"]["num_failures"] == 1
    # Below the summary there are the tokens, by name.
    good = [line.split() for line in done.stderr.splitlines() if line.endswith("1 LENGTH")]
    assert [words[:3] for words in good] == [["good", "1", "5"], ["Aggregated", "2", "5"]]
    assert done.returncode == 1
    assert "INVALID_ARGUMENT" in done.stderr


@contextmanager
def web_page(server: StartedServer, directory: Path, num_workers: int) -> Iterator[str]:
    """Locust's own, of one process or of a master and its workers."""
    locust = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE)]
    with ExitStack() as stack:
        port, led = (stack.enter_context(reserved_port()) for _ in range(2))
        page = [*locust, "--host", server.address, "--web-host", "127.0.0.1"]
        page += ["--web-port", str(port)]
        if num_workers:
            page += ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", str(led)]
        worker = [*locust, "--worker", "--master-port", str(led)]
        log = stack.enter_context((directory / "locust.log").open("wb"))
        for command in (page, *[worker] * num_workers):
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT
            )
            stack.callback(process.wait, TIMEOUT_S)
            stack.callback(process.terminate)
        url = f"http://127.0.0.1:{port}"
        get(f"{url}/worker-count", wanted=f'"worker_count": {num_workers}')
        yield url


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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_locusts_own_page_counts_streams_and_has_a_tab_for_tokens(
    server: StartedServer, tmp_path: Path, num_workers: int
) -> None:
    with web_page(server, tmp_path, num_workers) as url:
        page = get(f"{url}/")
        assert "scenario" in page
        assert "Tokens" in page
        form = {"user_count": "2", "spawn_rate": "2", "host": f"http://{server.address}"}
        form |= {"scenario": "mixed", "requests": "12", "max_new_tokens": "6", "seed": "3"}
        assert json.loads(get(f"{url}/swarm", form=form))["success"]
        stats = json.loads(get(f"{url}/stats/requests", wanted='"state": "stopped"'))
    *named, total = stats["stats"]
    assert {entry["method"] for entry in named} == {"stream"}
    assert total["num_requests"] == sum(entry["num_requests"] for entry in named) == 12
    assert stats["errors"] == []
    (table,) = stats["extended_stats"]
    *rows, everything = table["data"]
    assert {row["name"]: row["streams"] for row in rows} == {
        entry["name"]: entry["num_requests"] for entry in named
    }
    assert everything["streams"] == 12
    assert 12 < everything["tokens"] == sum(row["tokens"] for row in rows) <= 12 * 6
    assert everything["tokens_per_s"] > 0
    assert 0 < everything["first_token_p50"] <= everything["first_token_p99"]
    assert everything["first_token_p99"] < 1.01 * total["max_response_time"]
    assert everything["gap_p50"] > 0
