"""The report: one page that needs nothing else, and pictures of what there is."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from quill.loadtest.environment.process import ProcessSample
from quill.loadtest.environment.server import MetricsSample
from quill.loadtest.results import plots
from quill.loadtest.results.report import PAGE, RECORDS, write_report
from quill.loadtest.results.slo import RateTrial, Slo
from quill.loadtest.results.summary import Run
from quill.loadtest.workload.records import read_records
from tests.loadtest.made import made

RECORDED = [made(index, first_ms=50.0 + 7 * (index % 5)) for index in range(30)]
INFO = {"machine": "a <fast> one", "commit": "abc", "command": "quill loadtest"}
SAMPLES = [MetricsSample(1000.0 + tick / 4, tick % 3, tick % 5) for tick in range(12)]

PROCESS = [ProcessSample(1000.0 + tick, 100.0 + tick, 20, 10, 1.5 * tick) for tick in range(12)]


def images(page: str) -> list[str]:
    return re.findall(
        r'<img alt="([^"]*)" src="data:image/png;base64,[A-Za-z0-9+/=]{1000,}">', page
    )


def test_page_has_all_pictures_in_itself(tmp_path: Path) -> None:
    run = Run(
        RECORDED,
        INFO,
        SAMPLES,
        PROCESS,
        Slo.parse("ttft=60ms"),
        [RateTrial(1.0, 1.0, 1.0, 60), RateTrial(1.1, 0.5, 1.0, 66)],
        "verified: 30 of 30 answers are equal alone",
    )
    write_report(tmp_path, run)
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert images(page) == [
        "Latency over time",
        "Time to first token",
        "Gap between tokens",
        "Throughput against concurrency",
        "Offered and served",
        "Queue depth and running sequences",
        "Processor and memory",
        "Search",
    ]
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "a &lt;fast&gt; one" in page
    assert "30 of 30 answers are equal" in page
    assert "requests were served well, goodput" in page
    assert "highest rate that was carried: 1 requests/s" in page
    assert "1.1 requests/s failed: the limit is known to 10%." in page
    # Wilson's interval of 60 successes in 60.
    assert "Of 60 requests, 100.0% means 94.0% to 100.0% in the long run" in page
    assert "a longer --duration narrows it" in page
    assert "kept 1.50 cores busy on average (with the pauses between rates), and had 111 MB" in page
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert len(pictures) == 8


def test_raw_records_and_numbers_lie_beside_the_page(tmp_path: Path) -> None:
    summary = write_report(tmp_path, Run(RECORDED, INFO, SAMPLES))
    assert read_records(tmp_path / RECORDS) == RECORDED
    assert len((tmp_path / "server.csv").read_text().splitlines()) == 1 + len(SAMPLES)
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert numbers["num_tokens"] == summary.num_tokens == 150
    assert numbers["info"] == INFO
    assert numbers["scenarios"]["short-chat"]["num_tokens"] == 150


def test_what_the_server_did_not_tell_is_left_out_in_words(tmp_path: Path) -> None:
    write_report(tmp_path, Run(RECORDED, INFO))
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert "Queue depth and running sequences are left out" in page
    assert not (tmp_path / "server.png").exists()


def test_run_in_which_nothing_was_answered_has_a_page_too(tmp_path: Path) -> None:
    failed = made(status="UNAVAILABLE", ok=False, first_token_ms=None, token_ids=(), arrivals_ms=())
    write_report(tmp_path, Run([failed], INFO))
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert images(page) == []
    assert "Errors: 1 UNAVAILABLE" in page


def test_single_answer_can_be_drawn(tmp_path: Path) -> None:
    write_report(tmp_path, Run([made()], INFO, SAMPLES[:1]))
    assert len(images((tmp_path / PAGE).read_text(encoding="utf-8"))) == 6


def test_page_has_numbers_of_each_scenario(tmp_path: Path) -> None:
    other = [made(40 + i, first_ms=900.0, scenario="long-prompt", ok=i > 0) for i in range(3)]
    write_report(tmp_path, Run([*RECORDED, *other], INFO))
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    row = ["long-prompt", "3", "1", "15", "900.0", "900.0", "10.0", "10.0", "941.0", "941.0"]
    assert "".join(f"<td>{cell}</td>" for cell in row) in page
    write_report(tmp_path, Run(RECORDED, INFO))
    assert "By scenario" not in (tmp_path / PAGE).read_text(encoding="utf-8")


def test_open_loop_tells_what_was_offered_and_what_was_served(tmp_path: Path) -> None:
    # Due at 0.0, 0.1 … 2.9 s; all but the last ten end before the last is due.
    late = [made(i, first_ms=60.0 if i < 20 else 5000.0, offered_rate=10.0) for i in range(30)]
    summary = write_report(tmp_path, Run(late, INFO))
    assert summary.offered_per_s == pytest.approx(10)
    assert summary.served_per_s == pytest.approx(20 / 2.9)
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert "10.00 requests/s were offered and 6.90 were served" in page


def histogram(directory: Path, values: list[float]) -> Figure:
    run = Run([made(first_token_ms=value) for value in values])
    figure = plots.histogram(run, "time to first token", "requests")
    assert figure is not None
    plots.save(figure, "First tokens", directory / "first_token.png")
    return figure


@pytest.mark.parametrize("values", [[0.1, 2e6], [0.5, 3.0], [1.0, 900.0], [20.0, 15_000.0]])
def test_ticks_of_an_axis_do_not_run_into_one_another(tmp_path: Path, values: list[float]) -> None:
    figure = histogram(tmp_path, values)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    (panel,) = figure.axes
    low, high = panel.get_xlim()
    labels = [
        label.get_window_extent(canvas.get_renderer())
        for label in panel.get_xticklabels()
        if low <= label.get_position()[0] <= high and label.get_text()
    ]
    assert len(labels) >= 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(labels))
    assert not any("e" in label.get_text() for label in panel.get_xticklabels())


def test_axis_of_counts_has_whole_numbers(tmp_path: Path) -> None:
    (panel,) = histogram(tmp_path, [10.0, 20.0, 40.0]).axes
    assert all(float(tick).is_integer() for tick in panel.get_yticks())
