"""The paper's recipe on made-up pairs, and the mean of its last checkpoints."""

import json
import math
from pathlib import Path

import pytest
import torch

from quill.__main__ import main
from quill.model.checkpoint.checkpoint import load_checkpoint
from quill.model.checkpoint.run_directory import step_directories
from tests.model.runs import write_pairs


@pytest.fixture(scope="module")
def base_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """transformer-base as in the paper but for its vocabulary, context and number of steps."""
    directory = tmp_path_factory.mktemp("base")
    run = directory / "run"
    arguments = [
        *("train", "--preset", "transformer-base", "--out", str(run)),
        *("--pairs", str(write_pairs(directory / "pairs.tsv"))),
        *("--vocab-size", "300", "--context", "48", "--batch-tokens", "96"),
        *("--steps", "3", "--save-every", "1", "--evaluate-every", "3"),
    ]
    assert main(arguments) == 0
    return run


def test_paper_run_has_the_papers_shape_schedule_and_smoothing(base_run: Path) -> None:
    described = json.loads((base_run / "run.json").read_text())
    shape, recipe = described["model"], described["recipe"]
    assert (shape["d_model"], shape["num_heads"], shape["d_ff"]) == (512, 8, 2048)
    assert (shape["num_layers"], shape["num_encoder_layers"]) == (6, 6)
    assert (recipe["label_smoothing"], recipe["beta2"], recipe["warmup_steps"]) == (0.1, 0.98, 4000)
    (line,) = (base_run / "log.jsonl").read_text().splitlines()
    rate = json.loads(line)["learning_rate"]
    assert rate == pytest.approx(512**-0.5 * min(3**-0.5, 3 * 4000**-1.5))
    assert math.isfinite(json.loads(line)["loss"])


def test_mean_of_the_last_checkpoints_is_a_checkpoint(
    base_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = step_directories(base_run)
    assert len(paths) == 3
    out = tmp_path / "mean"
    assert main(["average", str(base_run), "--last", "2", "--out", str(out)]) == 0
    assert "step-00000002, step-00000003" in capsys.readouterr().out
    mean, *parts = (load_checkpoint(path).weights for path in (out, *paths[1:]))
    for name, weight in mean.items():
        assert torch.equal(weight, ((parts[0][name].double() + parts[1][name]) / 2).float()), name
    assert load_checkpoint(out).tokenizer is not None
    assert load_checkpoint(out).generation == {"temperature": 0.0}


def test_too_many_checkpoints_and_a_directory_that_is_there_are_refused(
    base_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for last, out, message in (
        ("4", tmp_path / "mean", "has 3 checkpoints"),
        ("1", tmp_path, "exists already"),
    ):
        assert main(["average", str(base_run), "--last", last, "--out", str(out)]) != 0
        assert message in capsys.readouterr().err
