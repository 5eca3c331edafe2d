"""A run that is killed, interrupted or out of disk goes on to exactly the same weights."""

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quill.__main__ import main
from quill.model.training.recipes import Recipe
from quill.model.training.scoring import Score
from quill.model.training.task import TextTask
from quill.model.training.trainer import StepResult, Trainer
from tests.model.runs import (
    last_checkpoint,
    log_lines,
    run_script,
    text_arguments,
    train,
    weight_bytes,
    weights,
    write_text,
)

# Each kills the process at an exact moment, as the power going off would.
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
BEFORE_STEP = """
old = training.Trainer.run_step
def run_step(self):
    if self.step == {}: {}
    return old(self)
training.Trainer.run_step = run_step
"""
MOMENTS = {
    "before the first checkpoint": BEFORE_STEP.format(2, KILL),
    "between two checkpoints": BEFORE_STEP.format(5, KILL),
    "while the second checkpoint is written": f"""
old = state.save_file
def save_file(tensors, path):
    if "step-00000006" in str(path):
        open(path, "wb").write(b"half")
        {KILL}
    old(tensors, path)
state.save_file = save_file
""",
    "before the second checkpoint gets its name": f"""
old = atomic._rename_over
def rename(source, target):
    if target.name == "step-00000006": {KILL}
    old(source, target)
atomic._rename_over = rename
""",
    "before the first checkpoint is let go": f"""
def rmtree(path): {KILL}
state.shutil.rmtree = rmtree
""",
    "in the middle of a line of the log": f"""
old = run.append_measurement
def append(path, measurement):
    if measurement.step == 8:
        path.open("a").write('{{"step": 8, "lo')
        {KILL}
    old(path, measurement)
run.append_measurement = append
""",
}
PREAMBLE = """
import os, signal, sys
import quill.model.checkpoint.atomic as atomic, quill.model.training.run as run
import quill.model.training.trainer as training
import quill.model.checkpoint.run_directory as state
from quill.__main__ import main
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(text_arguments(text, out))
    return out


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_point_it_resumes_to_the_same_weights(
    moment: str, text: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    script = PREAMBLE + MOMENTS[moment] + "main(sys.argv[1:])"
    result = run_script(script, *text_arguments(text, out))
    assert result.returncode == -signal.SIGKILL, result.stderr
    train(["train", "--resume", str(out)])
    assert weight_bytes(out) == weight_bytes(uninterrupted)
    assert [line["step"] for line in log_lines(out)] == [4, 8, 9]
    assert not list(out.glob(".*"))


@contextmanager
def interrupted_at(step: int) -> Iterator[None]:
    """Ctrl-C before this step."""
    run_step = Trainer.run_step

    def interrupted(self: Trainer) -> StepResult:
        if self.step == step:
            signal.raise_signal(signal.SIGINT)
        return run_step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run_step", interrupted)
        yield


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(
    text: Path,
    uninterrupted: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    with interrupted_at(4):
        assert main(text_arguments(text, out)) == 130
    assert last_checkpoint(out).name == "step-00000005"
    assert f"quill train --resume {out}" in capfd.readouterr().err
    train(["train", "--resume", str(out)])
    assert weight_bytes(out) == weight_bytes(uninterrupted)


def test_the_balance_of_experts_goes_on_where_it_was(text: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    train(text_arguments(text, whole, "--preset", "moe-tiny"))
    with interrupted_at(4):
        assert main(text_arguments(text, out, "--preset", "moe-tiny")) == 130
    train(["train", "--resume", str(out)])
    assert weight_bytes(out) == weight_bytes(whole)
    balance = weights(out)["decoder.3.feed_forward.balance_E"]
    assert 0 < float(balance.abs().max()) < 9 * 1.01e-3


@pytest.mark.parametrize(("step", "quick"), [(4, True), (9, False)])
def test_ctrl_c_is_heard_while_held_out_text_is_scored(
    step: int,
    quick: bool,
    text: Path,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    score = TextTask.score
    calls = iter([True, True, True, False])  # after steps 4, 8 and 9, and of the whole text

    def interrupted(self: TextTask, *arguments: Any) -> Score:
        if next(calls) is quick:
            signal.raise_signal(signal.SIGINT)
        return score(self, *arguments)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(TextTask, "score", interrupted)
        assert main(text_arguments(text, out)) == 130
    assert last_checkpoint(out).name == f"step-{step:08d}"
    captured = capfd.readouterr()
    assert f"quill train --resume {out}" in captured.err
    assert "bits per byte" not in captured.out
    train(["train", "--resume", str(out)])
    assert "bits per byte" in capfd.readouterr().out
    assert weight_bytes(out) == weight_bytes(uninterrupted)
    assert [line["step"] for line in log_lines(out)] == [4, 8, 9]


def test_a_full_disk_leaves_the_last_good_checkpoint(
    text: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    # The limit on a file's size is the system's own way to say that there is no more room.
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    script = f"{PREAMBLE}import resource\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    script += BEFORE_STEP.format(5, limit) + "sys.exit(main(sys.argv[1:]))\n"
    out = tmp_path / "run"
    result = run_script(script, *text_arguments(text, out))
    assert result.returncode == 1, result.stderr
    assert "can't write the checkpoint" in result.stderr
    assert f"quill train --resume {out}" in result.stderr
    assert "Traceback" not in result.stderr
    assert last_checkpoint(out).name == "step-00000003"
    assert not list(out.glob(".*.part"))
    train(["train", "--resume", str(out)])
    assert weight_bytes(out) == weight_bytes(uninterrupted)


def test_a_run_is_not_written_over_and_that_is_said_before_any_work(
    text: Path,
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = weight_bytes(uninterrupted)
    monkeypatch.setattr("quill.model.training.train.load_task", None)
    assert main(text_arguments(text, uninterrupted)) == 1
    assert "--resume" in capfd.readouterr().err
    assert weight_bytes(uninterrupted) == before


def test_a_run_is_not_resumed_on_other_data(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = Path(shutil.copy(text, tmp_path / "text.txt"))
    out = tmp_path / "run"
    train(text_arguments(data, out))
    with data.open("a") as file:
        file.write("One line more.")
    assert main(["train", "--resume", str(out)]) == 1
    assert "isn't what the run was begun with" in capfd.readouterr().err


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "config.json"])
def test_a_damaged_checkpoint_is_refused_by_name(
    file: str, uninterrupted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    damaged = last_checkpoint(out) / file
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert main(["train", "--resume", str(out)]) == 1
    assert str(last_checkpoint(out)) in capfd.readouterr().err


def test_a_finished_run_says_so(uninterrupted: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = weight_bytes(uninterrupted)
    train(["train", "--resume", str(uninterrupted)])
    assert f"{uninterrupted} is finished: 9 steps are done. --steps N" in capfd.readouterr().out
    assert weight_bytes(uninterrupted) == before


def test_more_steps_with_a_schedule_that_knows_no_end_are_as_if_asked_for_at_first(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    schedule = ("--schedule", "inverse_sqrt")
    train(text_arguments(text, tmp_path / "more", *schedule))
    train(["train", "--resume", str(tmp_path / "more"), "--steps", "12"])
    assert "as if begun with so many" in capfd.readouterr().out
    train(text_arguments(text, tmp_path / "whole", *schedule, "--steps", "12"))
    assert weight_bytes(tmp_path / "more") == weight_bytes(tmp_path / "whole")


def test_more_steps_with_a_cosine_follow_the_longer_one_and_can_be_interrupted(
    uninterrupted: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    runs = [Path(shutil.copytree(uninterrupted, tmp_path / name)) for name in ("one", "two")]
    train(["train", "--resume", str(runs[0]), "--steps", "14"])
    assert "may rise again" in capfd.readouterr().out
    recipe = Recipe(**json.loads((runs[0] / "run.json").read_text())["recipe"])
    assert recipe.num_steps == 14
    last = log_lines(runs[0])[-1]
    assert last["step"] == 14
    assert last["learning_rate"] == recipe.learning_rate_at(13)

    with interrupted_at(10):
        assert main(["train", "--resume", str(runs[1]), "--steps", "14"]) == 130
    train(["train", "--resume", str(runs[1])])
    assert last_checkpoint(runs[1]).name == "step-00000014"
    assert weight_bytes(runs[0]) == weight_bytes(runs[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "9"], "--steps is 9, and 9 steps are done already"),
        (["--seed=1"], "--seed can't be given with --resume"),
        (["--text=other.txt"], "--text can't be given with --resume"),
        (["--corpus=sotu"], "--corpus can't be given with --resume"),
        (["--resume", "/nothing"], "can't be resumed"),
    ],
)
def test_what_a_resumed_run_would_not_heed_is_refused(
    options: list[str], message: str, uninterrupted: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", str(uninterrupted), *options]) in (1, 2)
    assert message in capfd.readouterr().err


def test_a_run_is_resumed_from_any_directory(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(text.parent)
    out = tmp_path / "run"
    train(text_arguments(Path(text.name), out))
    monkeypatch.chdir(tmp_path)
    train(["train", "--resume", str(out), "--steps", "10"])
    assert last_checkpoint(out).name == "step-00000010"


def test_an_older_runs_relative_path_is_looked_for_from_here_or_explained(
    text: Path,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    description = json.loads((out / "run.json").read_text())
    description["data"]["files"] = [text.name]
    (out / "run.json").write_text(json.dumps(description))
    monkeypatch.chdir(text.parent)
    train(["train", "--resume", str(out)])
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", str(out)]) == 1
    assert f"{text.name} isn't in {tmp_path}" in capfd.readouterr().err


def test_a_warm_up_longer_than_the_run_is_warned_of(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(text_arguments(text, tmp_path / "run", "--steps", "1"))
    assert "the warm-up is 2 steps and the whole run 1," in capfd.readouterr().err
