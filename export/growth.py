"""Measures how a decode step's time grows with the context, the rows and the vocabulary.

    python -m export.growth BUNDLE PRECISION [--vocabularies 1024,8192,…]

Knows: graphs, slots, random networks of SmolLM2's width. Does not know: plots.
Prints JSON. What a slot holds doesn't change a step's time, so contexts aren't read, only claimed.
"""

import argparse
import json
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from export.bundle import Wishes, write_bundle
from export.manifest import read_manifest
from export.runner import Runner
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.transformer import Transformer

LENGTHS = (1, 128, 256, 512, 1024, 1536, 2048, 3072, 4095)
CONTEXT_ROWS = (1, 8)
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PAST = 64
NUM_TIMES = 5
VOCABULARIES = "1024,8192,24576,49152,98304"
NUM_LAYERS = 4  # of the random networks: enough to see, few enough to export in seconds

Points = list[tuple[float, float]]  # a size, and milliseconds a step


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints how a step's time grows, as JSON.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("precision")
    parser.add_argument("--vocabularies", default=VOCABULARIES)
    args = parser.parse_args()
    vocabularies = [int(each) for each in args.vocabularies.split(",")]
    runner = _open(args.bundle, args.precision, max(ROWS))
    record = {
        "context": {rows: context_growth(runner, rows) for rows in CONTEXT_ROWS},
        "rows": [(rows, _step_ms(runner, rows, PAST)) for rows in ROWS],
        "vocabulary": {rows: vocabulary_growth(vocabularies, rows) for rows in CONTEXT_ROWS},
    }
    print(json.dumps(record))


def context_growth(runner: Runner, num_rows: int) -> Points:
    lengths = [length for length in LENGTHS if length < runner.capacity]
    return [(length, _step_ms(runner, num_rows, length)) for length in lengths]


def vocabulary_growth(vocabularies: list[int], num_rows: int) -> Points:
    points = []
    for vocab_size in vocabularies:
        with tempfile.TemporaryDirectory() as directory:
            bundle = Path(directory) / "random"
            wishes = Wishes(precisions=("fp32",), quantiser="rtn", verify=False)
            write_bundle(bundle, random_checkpoint(vocab_size), wishes, lambda _: nullcontext())
            runner = _open(bundle, "fp32", num_rows)
            points.append((float(vocab_size), _step_ms(runner, num_rows, PAST)))
    return points


def random_checkpoint(vocab_size: int) -> Checkpoint:
    """SmolLM2's width, few layers."""
    config = ModelConfig(
        family="causal",
        vocab_size=vocab_size,
        context=256,
        d_model=576,
        num_layers=NUM_LAYERS,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        d_ff=1536,
        positions="rotary",
        norm="rms",
        activation="swiglu",
    )
    torch.manual_seed(0)
    return Checkpoint(config, Transformer(config).state_dict())


def _open(bundle: Path, precision: str, num_rows: int) -> Runner:
    manifest = read_manifest(bundle)
    capacity = min(manifest.sizes.context, LENGTHS[-1] + 1)
    return Runner(bundle, manifest.graphs_in(precision), manifest.sizes, num_rows, capacity)


def _step_ms(runner: Runner, num_rows: int, length: int) -> float:
    """The best of a few: other programs only ever make a step slower."""
    times = []
    for _ in range(NUM_TIMES + 1):  # the first one binds
        for slot in range(num_rows):
            runner.rewind(slot, length)
        start = time.perf_counter()
        runner.decode([0] * num_rows)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times[1:])


if __name__ == "__main__":
    main()
