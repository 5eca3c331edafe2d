"""Trains, exports, scores and draws by Quill's own commands, each in a process of its own.

Knows: the commands and the files that they leave. Does not know: what the numbers are for.
What is there already is kept, so that whoever was interrupted loses one stage at most.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quill.loadtest.errors import ContenderError, OptionError

NUM_PROBE_STEPS = 100
LOG_EVERY = 25  # steps; the last line's time has an evaluation in it
NUM_EVALUATIONS = 10
MIN_STEPS = 50


def quill(*arguments: object, quiet: bool = False) -> None:
    """Runs a command; what it prints is shown."""
    command = [sys.executable, "-m", "quill", *map(str, arguments)]
    where = subprocess.DEVNULL if quiet else None
    done = subprocess.run(command, stdout=where, check=False)
    if done.returncode:
        raise ContenderError(
            f"`quill {' '.join(map(str, arguments))}` ended with {done.returncode}; it said why "
            "above. Mend that and start again: what is done already is kept"
        )


def read_log(run: Path) -> list[dict[str, Any]]:
    """A run's measurements, with the time of all its processes: each counts from its own start."""
    entries: list[dict[str, Any]] = []
    before, last = 0.0, 0.0
    for line in _lines(run / "log.jsonl"):
        entry = json.loads(line)
        if entry["elapsed_s"] < last:
            before += last
        last = entry["elapsed_s"]
        entries.append(entry | {"elapsed_s": before + last})
    return entries


def read_run(run: Path) -> dict[str, Any]:
    try:
        description: dict[str, Any] = json.loads((run / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(
            f"{run} isn't a run of `quill train`: {error}. Name the directory that was its --out"
        ) from error
    if description["model"]["family"] != "seq2seq":
        raise OptionError(
            f"{run} doesn't translate: its family is {description['model']['family']}"
        )
    return description


def train(preset: str, run: Path, probe: Path, minutes: float) -> None:
    """A run of so many minutes, the probe and its last score not counted."""
    if (run / "run.json").exists():
        if not _is_finished(run):
            quill("train", "--resume", run)
        return
    num_steps = _steps_for(preset, probe, minutes)
    print(f"{preset}: {num_steps:,} steps should take {minutes:g} minutes", flush=True)
    every = max(num_steps // NUM_EVALUATIONS, 1)
    quill(
        *("train", "--preset", preset, "--out", run, "--steps", num_steps),
        *("--warmup", min(300, max(num_steps // 10, 1))),
        *("--evaluate-every", every, "--save-every", every),
    )


def _is_finished(run: Path) -> bool:
    log = read_log(run)
    return bool(log) and log[-1]["step"] >= read_run(run)["recipe"]["num_steps"]


def _steps_for(preset: str, probe: Path, minutes: float) -> int:
    """How long a step and an evaluation take is measured."""
    print(f"{preset}: measuring how long a step takes", flush=True)
    shutil.rmtree(probe, ignore_errors=True)
    quill(
        *("train", "--preset", preset, "--out", probe, "--steps", NUM_PROBE_STEPS),
        *("--warmup", 10, "--evaluate-every", NUM_PROBE_STEPS),
        quiet=True,
    )
    at = [entry["elapsed_s"] for entry in read_log(probe)]
    step_s = min(at[1] - at[0], at[2] - at[1]) / LOG_EVERY  # who else is busy here only adds
    evaluation_s = max(at[3] - at[2] - LOG_EVERY * step_s, 0.0)
    left_s = minutes * 60 - NUM_EVALUATIONS * evaluation_s
    return max(int(left_s / step_s), MIN_STEPS)


def export(run: Path, bundle: Path) -> None:
    """Into what a server would take. A bundle that is newer than the run's end is taken."""
    newest = max((path.stat().st_mtime for path in run.glob("step-*")), default=0.0)
    manifest = bundle / "manifest.json"
    if not manifest.exists() or manifest.stat().st_mtime < newest:
        quill("export", run, "--out", bundle)


def answers(run: Path, file: Path, num_sentences: int) -> list[dict[str, Any]]:
    """PyTorch's own translations of the test set, greedy, one by one."""
    quill(
        *("eval", run, "--beams", 1, "--limit", num_sentences, "--answers", file, "--device", "cpu")
    )
    return [json.loads(line) for line in _lines(file)]


def alignment(run: Path, sentence: str, file: Path) -> Mapping[str, Any] | None:
    """What each token looked at. None: the network looks at none."""
    recurrence = read_run(run)["model"].get("recurrence")
    if recurrence is not None and recurrence["context"] == "fixed":
        return None
    quill("attend", sentence, "--checkpoint", run, "--layers", "all", "--out", file)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _lines(path: Path) -> Sequence[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
