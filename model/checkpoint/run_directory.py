"""What a run leaves on disk so that it can go on exactly where it was.

    RUN/run.json                the settings: shape, recipe, data
    RUN/step-00000500/          a checkpoint, plus the optimizer's state
    RUN/log.jsonl               a line for each measurement
    RUN/loss.png, samples.txt   to look at

Knows: these names, and that a checkpoint is whole or absent.
Does not know: how a step is computed.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from quill.json_records import RecordError, from_json
from quill.model.checkpoint.atomic import atomic_directory, atomic_file
from quill.model.checkpoint.checkpoint import Checkpoint, write_files
from quill.model.data.source import DataSource
from quill.model.errors import CheckpointError, CorpusError

RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
STATE_FILE = "optimizer.safetensors"
PROGRESS_FILE = "training.json"
STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class TrainingState:
    """The optimizer's memory after so many steps."""

    step: int
    optimizer: dict[str, Tensor]


def step_directories(run: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    if not run.is_dir():
        return []
    return sorted(path for path in run.iterdir() if STEP_NAME.fullmatch(path.name))


def source_of(checkpoint: Checkpoint) -> DataSource | None:
    """The data that a checkpoint was trained on; None if it wasn't trained here."""
    if checkpoint.provenance.get("trained_by") != "quill":
        return None
    run = None if checkpoint.path is None else find_run(checkpoint.path)
    if run is not None:
        return read_source(run)
    corpus = checkpoint.provenance.get("data", {}).get("corpus")
    if corpus is None:
        raise CorpusError(
            "the model was trained on a user's files, and no run.json beside the "
            "checkpoint names them"
        )
    return DataSource(corpus)


def find_run(path: Path) -> Path | None:
    """The run that a directory is, or that a checkpoint is of."""
    runs = [each for each in (path, path.parent) if (each / RUN_FILE).exists()]
    return runs[0] if runs else None


def check_no_run(run: Path) -> None:
    """A directory that holds a run already is never written over."""
    if (run / RUN_FILE).exists() or step_directories(run):
        raise CheckpointError(
            f"{run} holds a training run already. Continue it with `quill train --resume {run}`, "
            "with --steps N if it shall have more steps, or choose another --out"
        )


def write_run(run: Path, description: dict[str, Any]) -> None:
    try:
        with atomic_file(run / RUN_FILE) as file:
            file.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"can't write into {run}: {error}") from error


def read_run(run: Path) -> dict[str, Any]:
    try:
        description = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{run} can't be resumed: {error}. It should be the --out directory of a run"
        ) from error
    if not isinstance(description, dict):
        raise CheckpointError(f"{run / RUN_FILE} doesn't describe a training run")
    return description


def read_source(run: Path) -> DataSource:
    """The data that a run was begun with, and what it held then."""
    try:
        return from_json(DataSource, read_run(run)["data"])
    except (KeyError, RecordError) as error:
        raise not_a_run(run, error) from error


def not_a_run(run: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{run / RUN_FILE} doesn't describe a training run: {error}")


def save_step(run: Path, checkpoint: Checkpoint, state: TrainingState, keep: int) -> Path:
    """Adds a checkpoint; only when it stands are older ones let go."""
    path = run / f"step-{state.step:08d}"
    try:
        with atomic_directory(path) as directory:
            write_files(directory, checkpoint)
            save_file(state.optimizer, directory / STATE_FILE)
            progress = json.dumps({"step": state.step}) + "\n"
            (directory / PROGRESS_FILE).write_text(progress, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"can't write the checkpoint {path}: {error}. The last good one is intact; free space "
            f"and continue with `quill train --resume {run}`"
        ) from error
    for old in step_directories(run)[:-keep]:
        shutil.rmtree(old)
    return path


def load_state(path: Path) -> TrainingState:
    try:
        step = int(json.loads((path / PROGRESS_FILE).read_text(encoding="utf-8"))["step"])
        return TrainingState(step, load_file(path / STATE_FILE))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path} has no training state to resume from: {error}") from error


def clean_leftovers(run: Path, last_step: int) -> None:
    """Removes what a killed process left behind: half-written files, lines past the checkpoint."""
    for leftover in run.glob(".*.part"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    log = run / LOG_FILE
    if log.exists():
        kept = [line for line in log.read_bytes().splitlines() if _is_before(line, last_step)]
        with atomic_file(log) as file:
            file.write_bytes(b"".join(line + b"\n" for line in kept))


def _is_before(line: bytes, last_step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= last_step
    except (ValueError, KeyError):
        return False  # the line that was being written when the process was killed


def pack_optimizer(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """AdamW's two averages for each parameter, by the parameter's name."""
    state = optimizer.state_dict()["state"]
    packed: dict[str, Tensor] = {}
    for index, name in enumerate(names):
        for key, value in state.get(index, {}).items():
            packed[f"{name}/{key}"] = value.detach().cpu().contiguous()
    return packed


def unpack_optimizer(
    optimizer: torch.optim.Optimizer, names: list[str], packed: dict[str, Tensor]
) -> None:
    """The reverse; refuses the state of another network by name."""
    description = optimizer.state_dict()
    description["state"] = {}
    for index, name in enumerate(names):
        entries = {
            key.rpartition("/")[2]: value.clone()  # at an address as aligned as PyTorch's own
            for key, value in packed.items()
            if key.rpartition("/")[0] == name
        }
        if not entries:
            raise CheckpointError(f"the optimizer's state lacks {name}")
        description["state"][index] = entries
    optimizer.load_state_dict(description)
