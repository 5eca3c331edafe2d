"""A soak in small, and what makes one fail."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from quill.loadtest.environment.process import (
    ProcessSample,
    busy_cores,
    peak_bytes_of,
    sample_process,
    slope_mb_per_minute,
)
from quill.loadtest.results.verify import Verdict
from quill.loadtest.run.soak import soak
from quill.loadtest.run.soak_criteria import SoakOptions, SoakResult, judge, medians
from quill.loadtest.workload.records import RequestRecord

REFUSAL = {"method": "GenerateStream", "outcome": "RESOURCE_EXHAUSTED", "total_ms": 0.4}
ANSWER = {"method": "GenerateStream", "outcome": "OK", "total_ms": 10.0}


def record(status: str, ok: bool = True, total_ms: float = 10.0) -> RequestRecord:
    return RequestRecord(0, "mixed", 0.0, status, ok, total_ms=total_ms)


def samples(mb_per_minute: float) -> list[ProcessSample]:
    return [ProcessSample(at_s, 100 + mb_per_minute * at_s / 60, 20, 10) for at_s in range(300)]


WELL = SoakResult(
    records=[record("OK"), record("RESOURCE_EXHAUSTED")],
    num_sent=2,
    num_ended=2,
    bound_ms=100.0,
    start=ProcessSample(0.0, 100.0, 20, 10),
    end=ProcessSample(300.0, 100.0, 20, 10),
    samples=samples(0.5),
    is_idle=True,
    log=[{"message": "ready"}, REFUSAL, ANSWER],
    verdict=Verdict(num_equal=2),
    options=SoakOptions(duration_s=300.0),
)
WITH_RELOADS = SoakOptions(duration_s=300.0, faults=["reload"], fault_period_s=10.0)
RELOADED = {"message": "the bundle tiny is on duty now"}


def failures(**changes: object) -> list[str]:
    return judge(replace(WELL, **changes)).failures  # type: ignore[arg-type]


def test_soak_in_which_all_is_well_passes() -> None:
    assert failures() == []


def test_each_thing_that_is_wrong_fails_alone() -> None:
    wrong: dict[str, dict[str, object]] = {
        "calls ended": {"num_sent": 3},
        "unexpected": {"records": [record("OK"), record("INTERNAL", ok=False)]},
        "each once": {"num_ended": 3},
        "no sequence runs": {"is_idle": False},
        "accepted": {"bound_ms": 9.0},
        "rejected": {"log": [ANSWER, REFUSAL | {"total_ms": 100.1}]},
        "no overload": {"log": [ANSWER]},
        "MB/min": {"samples": samples(1.1)},
        "descriptors": {"end": ProcessSample(300.0, 100.0, 21, 10)},
        "threads": {"end": ProcessSample(300.0, 100.0, 20, 99)},
        "equal": {"verdict": Verdict(num_equal=2, differences=["request 1"])},
    }
    for word, change in wrong.items():
        found = failures(**change)
        assert len(found) == 1, (word, found)
        assert word in found[0]


def test_call_that_was_lost_at_the_server_is_noticed_unless_its_client_left() -> None:
    assert failures(num_ended=1) != []
    left = [record("OK"), record("CANCELLED")]
    assert failures(records=left, num_ended=1) == []


def test_fault_that_never_came_or_that_the_server_did_not_notice_fails() -> None:
    log = [*WELL.log, RELOADED]
    assert failures(options=WITH_RELOADS, injected=["reload"], log=log) == []
    assert failures(options=WITH_RELOADS, injected=[], log=log) != []
    assert failures(options=WITH_RELOADS, injected=["reload"] * 2, log=log) != []


def test_with_faults_calls_may_end_several_times_but_none_never() -> None:
    changes = {"options": WITH_RELOADS, "injected": ["reload"], "log": [*WELL.log, RELOADED]}
    assert failures(**changes, num_ended=9) == []
    assert failures(**changes, num_ended=1) != []


def test_processes_that_are_replaced_in_each_round_have_no_slope() -> None:
    sawtooth = [ProcessSample(at_s, 100 + at_s % 50, 20, 10) for at_s in range(300)]
    assert slope_mb_per_minute(medians(sawtooth, 50.0)) == 0
    assert slope_mb_per_minute(sawtooth) > 1
    assert medians(sawtooth, 0.0) == sawtooth


def test_busy_process_is_seen_to_be_busy() -> None:
    before = sample_process(os.getpid())
    end_s = time.process_time() + 0.2
    while time.process_time() < end_s:
        pass
    after = sample_process(os.getpid())
    assert after.cpu_s - before.cpu_s >= 0.15  # the clock ticks 100 times a second
    (cores,) = busy_cores([before, after])
    assert cores == pytest.approx((after.cpu_s - before.cpu_s) / (after.at_s - before.at_s))


def test_memory_is_that_of_the_children_too() -> None:
    script = "some = bytearray(64 << 20); print(flush=True); input()"
    before, peak = sample_process(os.getpid()), peak_bytes_of(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        after = sample_process(os.getpid())
        assert after.memory_mb - before.memory_mb > 60
        assert peak_bytes_of(os.getpid()) - peak > 60 << 20
        assert after.cpu_s > before.cpu_s
        child.communicate(b"\n")


def test_slope_is_that_of_the_line() -> None:
    assert abs(slope_mb_per_minute(samples(2.5)) - 2.5) < 1e-6


def test_server_under_twice_its_load_loses_nothing(bundle: Path, tmp_path: Path) -> None:
    small = ("--max-num-seqs", "2", "--max-queue", "2", "--threads", "1")
    options = SoakOptions(duration_s=5.0, num_verified=20)
    judgement = soak(tmp_path, bundle, options, *small)
    # A machine that runs other tests may be slow: then this says nothing about speed.
    wrong = [failure for failure in judgement.failures if " is the limit" not in failure]
    assert wrong == [], "\n".join(judgement.lines)


def test_resuming_clients_lose_nothing_to_kills_and_reloads(bundle: Path, tmp_path: Path) -> None:
    """A model without text needs no grammar worker."""
    small = ("--max-num-seqs", "2", "--max-queue", "2", "--threads", "1")
    faults = ["kill-engine", "reload", "kill-frontend"]
    options = SoakOptions(
        duration_s=20.0, num_verified=20, num_keys=2, faults=faults, fault_period_s=8.0
    )
    judgement = soak(tmp_path, bundle, options, *small)
    assert judgement.failures == [], "\n".join(judgement.lines)
