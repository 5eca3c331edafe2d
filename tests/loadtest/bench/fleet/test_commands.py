"""`quill bench affinity` and `quill bench fleet`, small."""

import json
from pathlib import Path

import pytest

from quill.__main__ import main
from quill.loadtest.bench.fleet import affinity


def test_bench_affinity_asks_new_servers_the_same_and_tells_who_found_more(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--servers", "2", "--users", "3", "--requests", "24", "--rounds", "1"]
    options += [
        "--precision",
        "fp32",
        "--kv-cache-mb",
        "1",
        "--context",
        "64",
        "--out",
        str(tmp_path),
    ]
    assert main(["bench", "affinity", str(bundle), *options]) == 0
    assert "affinity / round robin: hit rate " in capsys.readouterr().out
    rounds = json.loads((tmp_path / "affinity.json").read_text())["rounds"]
    (turns,), (near,) = rounds["round-robin"], rounds["affinity"]
    assert turns["requests"] == [12, 12]
    assert sum(near["requests"]) == 24
    assert turns["num_prompt"] == near["num_prompt"]
    for each in (turns, near):
        num_read = each["num_prompt"] - each["num_cached"]
        assert sum(each["computed"]) == num_read + each["num_generated"]


def test_bench_affinity_takes_the_worse_of_requests_and_tokens() -> None:
    measured = affinity.Measured("affinity", 2.0, 100, 25, 50, 1.0, (2, 2), (10, 30))
    assert (measured.hit_rate, measured.tokens_a_second, measured.imbalance) == (0.25, 25.0, 1.5)


def test_bench_fleet_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--replicas", "4", "--rate", "1500", "--duration", "6", "--apps", "40"]
    assert main(["bench", "fleet", *options, "--out", str(tmp_path)]) == 0
    assert "picture: " in capsys.readouterr().out
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")
    outcomes = json.loads((tmp_path / "fleet.json").read_text())["outcomes"]
    assert [each["balance"] for each in outcomes] == ["round-robin", "least", "affinity"]
    assert len({each["num_calls"] for each in outcomes}) == 1
