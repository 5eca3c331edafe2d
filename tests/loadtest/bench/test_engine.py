"""The benchmarks, on a small bundle."""

import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from quill.__main__ import main
from quill.loadtest.bench.contenders.protocol import About
from quill.loadtest.bench.contenders.quill import Quill
from quill.loadtest.bench.contest import Result
from quill.loadtest.bench.models import gguf
from quill.loadtest.bench.report import markdown
from quill.loadtest.errors import OptionError
from quill.loadtest.workload.closed_loop import closed_loop

PROMPT = list(range(3, 43))


@pytest.fixture(scope="module")
def contender(bundle: Path) -> Quill:
    return Quill(bundle, "fp32", 1)


def test_quill_reads_decodes_and_draws_against_the_clock(contender: Quill) -> None:
    seconds = [
        contender.prefill(PROMPT),
        contender.decode(PROMPT, 4, 3),
        contender.decode(PROMPT, 4, 3, sampling="drawn"),
        contender.decode(PROMPT, 4, 3, sampling="cut"),
        contender.ragged([PROMPT[:9], PROMPT, PROMPT[:20]], 3),
    ]
    assert all(0 < each < 60 for each in seconds)


def test_quill_scores_every_token_but_the_first(contender: Quill) -> None:
    score = contender.score([PROMPT, PROMPT[:7]])
    assert score.num_tokens == len(PROMPT) - 1 + 6
    alone = contender.score([PROMPT])
    again = contender.score([PROMPT[:7]])
    assert score.nats == pytest.approx(alone.nats + again.nats)
    assert math.exp(score.nats / score.num_tokens) > 1


def test_bench_engine_writes_a_table_a_plot_and_the_numbers(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quill.loadtest.bench.contest.PAUSE_S", 0.0)
    options = ["--precision", "fp32", "--threads", "1", "--rounds", "1", "--out", str(tmp_path)]
    assert main(["bench", "engine", str(bundle), *options]) == 0
    record = json.loads((tmp_path / "results.json").read_text())
    [result] = record["results"]
    rows = (1, 2, 4, 8, 16, 32)
    tasks = [*(f"decode {num}" for num in rows), "ragged 8", "drawn 32", "cut 32"]
    assert list(result["speeds"]) == tasks  # its context is too short for the prefills
    assert all(speed > 0 for speed in result["speeds"].values())
    assert "commit" in record["facts"]
    assert (tmp_path / "results.md").read_text().startswith("|  | decode 1 |")
    assert (tmp_path / "speeds.png").read_bytes().startswith(b"\x89PNG")


def test_everybody_in_the_crowd_asks_until_the_time_is_over() -> None:
    together = threading.Barrier(3)
    asked: set[int] = set()

    def ask(ids: Sequence[int]) -> int:
        if threading.get_ident() not in asked:
            asked.add(threading.get_ident())
            together.wait(10)  # passes only if all three ask at the same time
        return len(ids)

    served = closed_loop(ask, [[1], [1, 2], [1, 2, 3]], 3, 0.05)
    assert len(asked) == 3
    assert served.num_requests >= 3
    assert served.num_requests <= served.num_tokens <= 3 * served.num_requests


def test_an_error_in_the_crowd_ends_it() -> None:
    def ask(ids: Sequence[int]) -> int:
        raise OptionError("no")

    with pytest.raises(OptionError, match="no"):
        closed_loop(ask, [[1]], 2, 60.0)


def test_a_line_of_the_table_has_speed_quality_and_memory() -> None:
    result = Result(About("Quill", "quill4", "9", 2_000_000), {"decode 1": 12.4}, 3_000_000, 33.0)
    text = markdown([result], {"machine": "this"})
    assert "| Quill quill4 | 12 | 33.000 | 2 | 3 | 9 |" in text
    assert "- machine: this" in text


def test_no_bundle_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", str(tmp_path / "none")]) != 0
    assert "there is no bundle at" in capsys.readouterr().err


def test_no_weights_are_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="quill import"):
        gguf(tmp_path)
