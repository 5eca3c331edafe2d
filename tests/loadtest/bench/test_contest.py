"""Contenders in processes of their own, each one's best of several rounds."""

import math
import sys
from pathlib import Path

import pytest

from quill.loadtest.bench.contest import contest
from quill.loadtest.bench.tasks import decode_tasks, prefill_tasks
from quill.loadtest.errors import ContenderError

TASKS = [*prefill_tasks(range(200), 1000), *decode_tasks(range(64), (8,))]


def reciting(*answers: str) -> list[str]:
    return [sys.executable, "-m", "tests.loadtest.reciting_contender", *answers]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quill.loadtest.bench.contest.PAUSE_S", 0.0)


def test_the_best_of_all_rounds_counts(tmp_path: Path) -> None:
    commands = [reciting("slow", "2", "8", "1", "4"), reciting("fast", "0.5")]
    slow, fast = contest(commands, TASKS, [], tmp_path, num_rounds=2)
    # prefill 128: 2 s, then 1 s; decode of 8 rows, 4 steps: 8 s, then 4 s.
    assert slow.speeds == {"prefill 128": 128.0, "decode 8": 8.0}
    assert fast.speeds == {"prefill 128": 256.0, "decode 8": 64.0}
    assert (slow.about.name, fast.about.name) == ("slow", "fast")


def test_memory_and_perplexity_stand_beside_every_speed(tmp_path: Path) -> None:
    [result] = contest([reciting("one", "1")], TASKS, [[1, 2, 3], [4, 5]], tmp_path, num_rounds=1)
    assert result.perplexity == pytest.approx(math.exp(2.0))
    assert 2**20 < result.peak_bytes < 2**32


def test_without_passages_there_is_no_perplexity(tmp_path: Path) -> None:
    [result] = contest([reciting("one", "1")], TASKS, [], tmp_path, num_rounds=1)
    assert math.isnan(result.perplexity)


def test_a_task_that_fails_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(ContenderError, match="prefill failed: ValueError: as I was told"):
        contest([reciting("one", "fail")], TASKS, [], tmp_path)


def test_a_contender_that_dies_is_told_with_its_command(tmp_path: Path) -> None:
    with pytest.raises(ContenderError, match="reciting_contender one die` ended"):
        contest([reciting("one", "die")], TASKS, [], tmp_path)


def test_a_contender_that_does_not_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ContenderError, match=r"No module named tests\.loadtest\.nobody"):
        contest([[sys.executable, "-m", "tests.loadtest.nobody"]], TASKS, [], tmp_path)
