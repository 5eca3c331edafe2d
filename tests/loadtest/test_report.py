"""The report: one page that needs nothing else, and pictures of what there is."""

import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from loadtest import plots
from loadtest.metrics import MetricsSample
from loadtest.records import read_records
from loadtest.report import PAGE, RECORDS, Run, write_report
from loadtest.slo import RateTrial, Slo
from tests.loadtest.made import made

RECORDED = [made(index, first_ms=50.0 + 7 * (index % 5)) for index in range(30)]
FACTS = {"machine": "a <fast> one", "commit": "abc", "command": "quill loadtest"}
SAMPLES = [MetricsSample(1000.0 + tick / 4, tick % 3, tick % 5) for tick in range(12)]


def images(page: str) -> list[str]:
    return re.findall(
        r'<img alt="([^"]*)" src="data:image/png;base64,[A-Za-z0-9+/=]{1000,}">', page
    )


def test_page_has_all_pictures_in_itself(tmp_path: Path) -> None:
    run = Run(
        RECORDED,
        FACTS,
        SAMPLES,
        Slo.parse("ttft=60ms"),
        [RateTrial(1.0, 1.0, 1.0), RateTrial(2.0, 0.5, 1.0)],
        "verified: 30 of 30 answers are equal alone",
    )
    write_report(tmp_path, run)
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert images(page) == [
        "Latency over time",
        "Time to first token",
        "Gap between tokens",
        "Throughput against concurrency",
        "Queue depth and running rows",
        "Search",
    ]
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "a &lt;fast&gt; one" in page
    assert "30 of 30 answers are equal" in page
    assert "highest rate that was carried: 1 requests/s" in page
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert len(pictures) == 6


def test_raw_records_and_numbers_lie_beside_the_page(tmp_path: Path) -> None:
    summary = write_report(tmp_path, Run(RECORDED, FACTS, SAMPLES))
    assert read_records(tmp_path / RECORDS) == RECORDED
    assert len((tmp_path / "server.csv").read_text().splitlines()) == 1 + len(SAMPLES)
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert numbers["num_tokens"] == summary.num_tokens == 150
    assert numbers["facts"] == FACTS


def test_what_the_server_did_not_tell_is_left_out_in_words(tmp_path: Path) -> None:
    write_report(tmp_path, Run(RECORDED, FACTS))
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert "Queue depth and running rows are left out" in page
    assert not (tmp_path / "server.png").exists()


def test_run_in_which_nothing_was_answered_has_a_page_too(tmp_path: Path) -> None:
    failed = made(status="UNAVAILABLE", ok=False, first_token_ms=None, token_ids=(), arrivals_ms=())
    write_report(tmp_path, Run([failed], FACTS))
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert images(page) == []
    assert "Errors: 1 UNAVAILABLE" in page


def test_single_answer_can_be_drawn(tmp_path: Path) -> None:
    write_report(tmp_path, Run([made()], FACTS, SAMPLES[:1]))
    assert len(images((tmp_path / PAGE).read_text(encoding="utf-8"))) == 5


def test_axis_of_counts_has_whole_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    plots.histogram("time to first token")([10.0, 20.0, 40.0], tmp_path / "first_token.png")
    (panel,) = figures[0].axes
    assert all(float(tick).is_integer() for tick in panel.get_yticks())
