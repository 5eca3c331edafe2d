"""`quill loadtest` from its first word to its report."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from quill.__main__ import main
from quill.loadtest.environment.server import StartedServer
from quill.loadtest.errors import LoadtestError
from quill.loadtest.protocols.grpc import GrpcClient
from quill.loadtest.run.loadtest import check_all_recorded
from quill.loadtest.workload.call import call, from_json
from quill.loadtest.workload.records import RequestRecord, read_records, write_records
from quill.loadtest.workload.request import ModelInfo
from quill.loadtest.workload.scenarios import make_request
from quill.server.auth.key_file import add_key
from tests.loadtest.made import made
from tests.server.authority import Authority, write

ROOT = Path(__file__).resolve().parents[3]


class Done(NamedTuple):
    code: int
    out: str
    errors: str


class Loadtest:
    """Runs the command here; Locust and servers are processes of their own anyway."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, out: Path, arguments: str) -> Done:
        code = main(["loadtest", "--out", str(out), *shlex.split(arguments)])
        return Done(code, *self._capfd.readouterr())


@pytest.fixture
def loadtest(capfd: pytest.CaptureFixture[str]) -> Iterator[Loadtest]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield Loadtest(capfd)
    for number, handler in before.items():
        signal.signal(number, handler)


def num_pictures(page: str) -> int:
    """Without that of the process, which a load of a second or two can't have; then it says so."""
    is_left_out = "processor and memory are left out" in page
    assert ('alt="Processor and memory"' in page) is not is_left_out
    return page.count("data:image/png") - (not is_left_out)


def test_without_an_address_it_starts_a_server_and_verifies_what_it_said(
    loadtest: Loadtest, bundle: Path, tmp_path: Path
) -> None:
    server = f"--bundle {bundle} --precision fp32 --serve '--threads 1 --max-num-seqs 4'"
    load = "--users 6 --requests 40 --scenario mixed --max-new-tokens 6 --verify"
    done = loadtest(tmp_path, f"{server} {load}")
    assert done.code == 0, done.errors
    assert "tiny, fp32 on cpu" in done.out
    assert "verified: 40 of 40 answers are equal alone" in done.out
    assert "stopped" in (tmp_path / "server.log").read_text()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for wanted in ("40 of 40", "fp32 on cpu", "commit", "command", "machine", "Queue depth"):
        assert wanted in page
    assert num_pictures(page) == 6
    assert "By scenario" in page
    assert json.loads((tmp_path / "summary.json").read_text())["num_requests"] == 40


def test_beam_search_is_verified_over_tls_with_a_key_that_no_file_contains(
    loadtest: Loadtest, bundle: Path, tmp_path: Path
) -> None:
    ours = Authority("ours")
    files = write(tmp_path, ours.sign("server"))
    (tmp_path / "ca.pem").write_bytes(ours.cert)
    secret = add_key(tmp_path / "keys.json", "client")
    (tmp_path / "client.key").write_text(secret)
    protection = f"--tls-cert {files.cert} --tls-key {files.key} --api-keys {tmp_path}/keys.json"
    out = tmp_path / "out"
    done = loadtest(
        out,
        f"--bundle {bundle} --precision fp32 --serve '--threads 1 --max-num-seqs 8 {protection}' "
        f"--ca {tmp_path}/ca.pem --api-key-file {tmp_path}/client.key --workers 1 --verify "
        "--users 3 --requests 12 --scenario beams --max-new-tokens 6",
    )
    assert done.code == 0, done.errors
    assert "verified: 12 of 12 answers are equal alone" in done.out
    for record in read_records(out / "requests.csv"):
        # An answer comes whole, when the search is over.
        assert 1 <= len(set(record.arrivals_ms)) <= from_json(record.request).num_sequences
    assert num_pictures((out / "report.html").read_text(encoding="utf-8")) == 6
    assert not any(secret in path.read_text(errors="replace") for path in out.iterdir())


@pytest.mark.parametrize("protocol", ["http", "kserve"])
def test_load_over_another_protocol_is_verified_and_the_report_names_it(
    protocol: str, loadtest: Loadtest, server: StartedServer, tmp_path: Path
) -> None:
    where = f"--address {server.address} --http {server.http_address} --protocol {protocol}"
    load = "--users 6 --requests 24 --scenario mixed --max-new-tokens 6 --verify"
    done = loadtest(tmp_path, f"{where} {load}")
    assert done.code == 0, done.errors
    assert "verified: 24 of 24 answers are equal alone" in done.out
    title = {"http": "over HTTP", "kserve": "over KServe v2"}[protocol]
    assert title in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_open_loop_tells_its_goodput(
    loadtest: Loadtest, server: StartedServer, tmp_path: Path
) -> None:
    load = "--rate 30 --shape ramp --duration 1500ms --slo ttft=60s,gap=60s --max-new-tokens 4"
    done = loadtest(tmp_path, f"--address {server.address} {load}")
    assert done.code == 0, done.errors
    assert "100.0% of all requests were served well, goodput" in done.out


@pytest.fixture(scope="module")
def recorded(server: StartedServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a load leaves it."""
    info = ModelInfo(vocab_size=512, context=128, has_tokenizer=False, has_template=False)
    path = tmp_path_factory.mktemp("recorded") / "requests.csv"
    with closing(GrpcClient(server.address)) as client:
        loads = [make_request("short-chat", 0, index, info) for index in range(8)]
        write_records(
            path,
            [
                call(client, load, 0.0).record(load, i, load.kind, 0.0)
                for i, load in enumerate(loads)
            ],
        )
    return path


def test_recorded_file_is_verified_and_a_changed_answer_is_found(
    loadtest: Loadtest, recorded: Path, server: StartedServer, tmp_path: Path
) -> None:
    arguments = f"--address {server.address} --verify --recorded"
    same = loadtest(tmp_path, f"{arguments} {recorded}")
    assert same.code == 0, same.errors
    first, *others = read_records(recorded)
    changed = tmp_path / "changed.csv"
    tokens = ((first.token_ids[0] + 1) % 512, *first.token_ids[1:])
    write_records(changed, [type(first)(**{**vars(first), "token_ids": tokens}), *others])
    other = loadtest(tmp_path, f"{arguments} {changed}")
    assert other.code == 1
    assert other.errors.startswith(f"quill: 1 of {1 + len(others)} answers differ: request")
    assert other.errors.count("\n") == 1


def test_recorded_file_is_reported_on_without_a_server(
    loadtest: Loadtest, recorded: Path, tmp_path: Path
) -> None:
    done = loadtest(tmp_path, f"--recorded {recorded}")
    assert done.code == 0, done.errors
    assert "left out" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_search_ends_with_a_rate_and_its_goodput(
    loadtest: Loadtest, server: StartedServer, tmp_path: Path
) -> None:
    # Nothing meets a limit of a millisecond: the search goes down and says so.
    load = "--shape search --slo total=1ms --rate 40 --duration 200ms --requests 2"
    done = loadtest(tmp_path, f"--address {server.address} {load}")
    assert done.code == 0, done.errors
    assert "40 requests/s isn't carried: 0.0% served well" in done.out
    assert "No rate was carried, down to" in done.out
    assert (tmp_path / "search.png").exists()
    assert "had 30 s to end" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--shape search", "--shape search needs --slo"),
        ("--scenario polite", "no scenario 'polite'"),
        ("--duration soon", "isn't a duration"),
        ("--seed 0", "seeds begin at 1"),
        ("--users 0", "must be above 0"),
        ("--address x:1 --precision fp32", "--address names a server"),
        ("--shape search --users 3 --slo ttft=1s", "searches a --rate"),
        ("--recorded /nowhere.csv", "can't read /nowhere.csv"),
        ("--scenario embed --protocol http", "--scenario embed works over gRPC only"),
        ("--address quill://a:1,b:2 --protocol http", "balanced over gRPC only"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    loadtest: Loadtest, arguments: str, reason: str, tmp_path: Path
) -> None:
    done = loadtest(tmp_path, arguments)
    assert done.code in (1, 2)
    assert reason in done.errors
    assert done.errors.count("\n") == 1


def requests(out: Path) -> list[str]:
    return [each.request for each in sorted(read_records(out / "requests.csv"), key=by_index)]


def by_index(record: RequestRecord) -> int:
    return record.index


def test_second_run_is_not_flattered_by_the_prefix_cache_and_a_seed_repeats_the_first(
    loadtest: Loadtest, server: StartedServer, tmp_path: Path
) -> None:
    load = f"--address {server.address} --scenario long-prompt --requests 6"
    first, second, again = (tmp_path / name for name in ("first", "second", "again"))
    seeds = []
    for out in (first, second):
        done = loadtest(out, load)
        assert done.code == 0, done.errors
        seeds += re.findall(r"--seed (\d+) sends the same requests again", done.out)
        numbers = json.loads((out / "summary.json").read_text())
        assert numbers["cached_share"] < 0.1
    assert len(set(seeds)) == 2
    assert loadtest(again, f"{load} --seed {seeds[0]}").code == 0
    assert requests(again) == requests(first) != requests(second)
    assert json.loads((again / "summary.json").read_text())["cached_share"] > 0.5
    assert "the run is flattered" in (again / "report.html").read_text(encoding="utf-8")


@contextmanager
def in_the_middle(out: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A load of ten minutes of which some requests have ended. Nothing is left of it."""
    command = [sys.executable, "-m", "quill", "loadtest", "--out", str(out), "--duration", "10m"]
    # Who runs in a script's background ignores Ctrl-C, and under nohup a terminal's end, too. So
    # would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, *arguments], cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    ) as process:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGHUP, hangup)
        try:
            assert process.stdout is not None
            next(line for line in process.stdout if re.search(r" [1-9][\d,]* requests ", line))
            yield process
        finally:
            process.terminate()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_ctrl_c_leaves_a_report_of_what_has_ended(
    server: StartedServer, tmp_path: Path, workers: str
) -> None:
    arguments = ("--address", server.address, "--users", "2", "--workers", workers)
    with in_the_middle(tmp_path, *arguments) as process:
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert (
        errors == "quill: stopped by Ctrl-C; the report has the requests that had ended by then\n"
    )
    assert "report: " in out
    assert "Ctrl-C ended the run early" in (tmp_path / "report.html").read_text(encoding="utf-8")
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert 0 < numbers["num_requests"] == numbers["statuses"]["OK"]


def test_closed_terminal_ends_the_server_and_locust_too(bundle: Path, tmp_path: Path) -> None:
    with in_the_middle(tmp_path, "--bundle", str(bundle), "--serve", "--threads 1") as process:
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGHUP
    assert '"stopped"' in (tmp_path / "server.log").read_text()
    assert "Got SIGTERM" in (tmp_path / "locust.log").read_text()


def test_request_that_was_begun_and_has_no_record_is_an_error(tmp_path: Path) -> None:
    check_all_recorded([made(0), made(1)], tmp_path / "locust.log")
    with pytest.raises(LoadtestError, match="1 of 3 requests have no record"):
        check_all_recorded([made(0), made(2)], tmp_path / "locust.log")
