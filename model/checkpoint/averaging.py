"""`quill average`: the mean of a run's last checkpoints, as the paper does it (section 6.1).

Knows: a run's checkpoints. Does not know: training, how good the mean is.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quill.model.checkpoint.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from quill.model.checkpoint.run_directory import step_directories
from quill.model.errors import CheckpointError
from quill.model.progress import track


def run(args: argparse.Namespace) -> None:
    paths = step_directories(args.run_directory)
    if not 1 <= args.last <= len(paths):
        raise CheckpointError(
            f"--last is {args.last}, and {args.run_directory} has {len(paths)} checkpoints. Train "
            "with --keep to have more"
        )
    if args.out.exists():
        raise CheckpointError(f"{args.out} exists already; give --out a new directory")
    chosen = paths[-args.last :]
    save_checkpoint(args.out, average(chosen))
    print(f"The mean of {', '.join(path.name for path in chosen)} is in {args.out}")


def average(paths: Sequence[Path]) -> Checkpoint:
    """One after another: never more than two are in memory."""
    newest = load_checkpoint(paths[-1])
    sums = {name: weight.double() for name, weight in newest.weights.items()}
    for path in track(paths[:-1], "averaging"):
        other = load_checkpoint(path)
        if other.config != newest.config:
            raise CheckpointError(f"{path} and {paths[-1]} are of different shapes")
        for name, weight in other.weights.items():
            sums[name] += weight
    weights = {name: (total / len(paths)).float() for name, total in sums.items()}
    provenance = newest.provenance | {"mean_of": [path.name for path in paths]}
    return replace(newest, weights=weights, provenance=provenance)
