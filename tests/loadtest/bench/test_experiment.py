"""Backends in processes of their own, in turns, each one's best of several rounds; the report."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quill.loadtest.bench.engine import decode, prefills, speed_experiment
from quill.loadtest.bench.experiment import Entry, Experiment, Measured, Workload, run_experiment
from quill.loadtest.bench.report import (
    LABEL,
    markdown,
    read_results,
    run_and_report,
    table_cells,
    write,
    write_results,
)
from quill.loadtest.errors import BackendError, LoadtestError, OptionError

WORKLOADS = [*prefills(range(200), 1000), decode(range(64), 8)]
SCORE = Workload("score", [{"do": "score", "passages": [[1, 2, 3], [4, 5]]}], once=True)


def fake(*answers: str, label: str = "") -> Entry:
    return Entry([sys.executable, "-m", "tests.loadtest.fake_backend", *answers], label)


def run(*entries: Entry, rounds: int = 1, **changes: Any) -> tuple[Experiment, list[Measured]]:
    workloads: Sequence[Workload] = changes.pop("workloads", WORKLOADS)
    experiment = speed_experiment("fake", entries, workloads, rounds)
    experiment = Experiment(**vars(experiment) | changes)
    return experiment, run_experiment(experiment)


def test_the_best_of_all_rounds_counts() -> None:
    _, (slow, fast) = run(fake("slow", "2", "8", "1", "4"), fake("fast", "0.5"), rounds=2)
    # prefill 128: 2 s, then 1 s; decode of 8 sequences, 4 steps: 8 s, then 4 s.
    assert slow.speeds("prefill 128") == [64.0, 128.0]
    assert (slow.speed("prefill 128"), slow.speed("decode 8")) == (128.0, 8.0)
    assert (fast.speed("prefill 128"), fast.speed("decode 8")) == (256.0, 64.0)
    assert slow.best("decode 8")["seconds"] == 4.0


def test_warm_up_does_not_count() -> None:
    _, (result,) = run(fake("one", "9", "9", "1", "1"), warm_up=True)
    assert result.speeds("prefill 128") == [128.0]


def test_entries_with_one_command_share_a_process() -> None:
    shared = fake("one", "1", "2").command
    entries = [Entry(shared, "first"), Entry(shared, "second")]
    _, (first, second) = run(*entries, workloads=WORKLOADS[:1])
    assert (first.speed("prefill 128"), second.speed("prefill 128")) == (128.0, 64.0)


def test_what_was_measured_earlier_is_not_measured_again(tmp_path: Path) -> None:
    first, second = fake("first", "1", label="first"), fake("second", "2", label="second")
    _, earlier = run(first, rounds=1, workloads=[*WORKLOADS, SCORE])
    saved: list[list[str]] = []
    experiment, _ = run(rounds=2, workloads=[*WORKLOADS, SCORE], entries=[first, second])
    results = run_experiment(experiment, earlier, lambda r: saved.append([e.label for e in r]))
    assert [each.label for each in results] == ["first", "second"]
    for each in results:
        assert {name: len(turns) for name, turns in each.turns.items()} == {
            "prefill 128": 2,
            "decode 8": 2,
            "score": 1,
        }
    assert saved == [["first", "second"]] * 3  # after each round, and at the end
    gone = Entry([sys.executable, "-m", "tests.loadtest.nobody"], "first")
    complete = Experiment(**vars(experiment) | {"entries": [gone]})
    assert run_experiment(complete, results) == results  # it isn't even started


def test_written_results_are_read_again_at_the_same_commit(tmp_path: Path) -> None:
    experiment, results = run(fake("one", "1"), workloads=[*WORKLOADS, SCORE])
    path = tmp_path / "fake.json"
    assert read_results(path) == []
    write_results(experiment, results, tmp_path)
    assert read_results(path) == results
    path.write_text(path.read_text().replace('"commit": "', '"commit": "another '))
    with pytest.raises(OptionError, match="measured at commit another"):
        read_results(path)


def test_workload_of_one_entry_leaves_the_others_out() -> None:
    only = Workload("prefill 3", [{"do": "prefill", "ids": [1]}], 3, entries=("b",))
    experiment, results = run(
        fake("a", "1", label="a"), fake("b", "1", label="b"), workloads=[only]
    )
    assert [row[1] for row in table_cells(experiment, results)] == ["–", "3"]


def test_speed_and_memory_stand_side_by_side(tmp_path: Path) -> None:
    experiment, results = run(fake("one", "1"), workloads=[*WORKLOADS, SCORE])
    assert 2**20 < (results[0].peak_bytes or 0) < 2**32
    results[0].peak_bytes = 3_000_000
    text = markdown(experiment, results, {"machine": "this"})
    assert "| one none | 128 | 32 | 7 | 3 | 1 |" in text
    assert "- machine: this" in text
    write(experiment, results, tmp_path)
    record = json.loads((tmp_path / "fake.json").read_text())
    assert record["results"][0]["turns"]["prefill 128"] == [{"num_tokens": 128, "seconds": 1.0}]
    assert "commit" in record["info"]
    assert (tmp_path / "fake.md").read_text().startswith("|  | prefill 128 |")
    assert (tmp_path / "fake.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fake_backend", "one", "fail"], "prefill failed: ValueError: as given"),
        (["fake_backend", "one", "die"], "fake_backend one die` ended"),
        (["nobody"], r"No module named tests\.loadtest\.nobody"),
    ],
)
def test_backend_that_fails_is_an_error_with_its_reason(words: list[str], message: str) -> None:
    module, *arguments = words
    command = [sys.executable, "-m", f"tests.loadtest.{module}", *arguments]
    with pytest.raises(BackendError, match=message):
        run(Entry(command))


def test_problems_fail_the_command_after_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    experiment = Experiment(
        "x", "x", [fake("one", "1")], WORKLOADS, [LABEL], 1, problems=lambda _: ["worse"]
    )
    with pytest.raises(LoadtestError, match="worse"):
        run_and_report(experiment)
    assert "one none" in capsys.readouterr().out
