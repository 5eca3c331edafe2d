"""A load on two real servers, of which one is killed under it: nothing is lost."""

import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from quill.__main__ import main
from quill.loadtest.workload.records import read_records
from tests.server.faults import Faults
from tests.server.process import ServerProcess, server_process, wait_until

NUM_REQUESTS = 60


def test_death_of_the_first_server_loses_nothing_and_changes_no_answer(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = Faults(tmp_path)
    faults.start("slow")
    out = tmp_path / "out"

    def kill(server: ServerProcess) -> None:
        records = out / "requests.csv"
        wait_until(
            lambda: records.exists() and len(records.read_bytes().splitlines()) > 10,
            "some requests have ended",
        )
        server.signal(signal.SIGKILL)
        server.process.wait()
        faults.end("slow")

    with ExitStack() as stack:
        two = [
            stack.enter_context(
                server_process(bundle, tmp_path / f"log-{each}", environment=faults.environment)
            )
            for each in range(2)
        ]
        killer = threading.Thread(target=kill, args=(two[0],))
        killer.start()
        address = "quill://" + ",".join(each.address for each in two)
        load = ["--users", "8", "--requests", str(NUM_REQUESTS), "--max-new-tokens", "20"]
        place = ["--address", address, "--seed", "3", "--out", str(out)]
        assert main(["loadtest", *place, *load, "--verify"]) == 0
        killer.join()
    records = read_records(out / "requests.csv")
    assert sorted(each.index for each in records) == list(range(NUM_REQUESTS))
    assert {each.status for each in records} == {"OK"}
    assert f"verified: {NUM_REQUESTS} of {NUM_REQUESTS}" in capsys.readouterr().out
