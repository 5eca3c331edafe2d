"""The benchmark of restarts, on real servers with a small untrained model."""

import json
from pathlib import Path
from typing import Any

import pytest

from quill.__main__ import main
from quill.loadtest.bench.backends.protocol import BackendInfo
from quill.loadtest.bench.experiment import Measured
from quill.loadtest.bench.restart import BESIDE, COLD, FROM_DISK, RESTARTED, problems, rows

TURN = {"first_tokens_s": [2.0, 1.0, 3.0], "answers": [[1], [2], [3]], "start_s": 1.0}
COLD_TURN = TURN | {"directory_bytes": 5e6}
FAST = TURN | {"first_tokens_s": [0.1, 0.1, 0.4]}
OTHER = FAST | {"answers": [[1], [2], [4]]}


def test_bench_restart_sends_the_same_prompts_to_four_servers(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompts", "3", "--prompt-tokens", "50", "--answer", "4", "--threads", "1"]
    assert main(["bench", "restart", str(bundle), *options, "--out", str(tmp_path)]) == 0
    (result,) = json.loads((tmp_path / "restart.json").read_text())["results"]
    turns = result["turns"]
    (cold,), (again,), (from_disk,) = turns[COLD], turns[RESTARTED], turns[FROM_DISK]
    assert cold["answers"] == again["answers"] == from_disk["answers"]
    assert [len(each) for each in cold["answers"]] == [4, 4, 4]
    assert cold["directory_bytes"] == again["directory_bytes"] > 0
    assert "started again: equal answers" in capsys.readouterr().out


def test_other_answers_fail_the_benchmark_and_ratios_are_of_medians() -> None:
    gaps = {"alone": [0.02, 0.03, 0.04, 0.05], "beside": [0.03, 0.04, 0.05, 0.06]}
    turns: dict[str, list[Any]] = {
        COLD: [COLD_TURN],
        RESTARTED: [FAST],
        FROM_DISK: [OTHER],
        BESIDE: [gaps],
    }
    measured = Measured("Quill", BackendInfo("Quill", "", "", 0), turns)
    shown = {row.label: (row.result, row.more) for row in rows([measured])}
    assert shown["started again / cold"] == ("0.050", "of the medians")
    assert shown[f"{FROM_DISK}: equal answers"] == ("2", "of 3")
    assert shown["gaps of 8 streams beside, ms"] == ("30", "median; p95, p99 and most: 40 50 60")
    assert problems([measured]) == [f"1 answers differ: {FROM_DISK}"]


def test_bench_restart_needs_a_context_for_its_prompts(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "restart", str(bundle)]) == 2
    assert "a causal model with a context of 2016 is needed" in capsys.readouterr().err
