"""Measures the speed of a bundle's graphs on this machine, without a server.

Knows: decode steps of 1, 8 and 32 sequences, a prefill, and a baseline. Does not know: servers.

The baseline is one float32 matrix product with as many weights as the network has, measured in the
same minute: a step without attention, norms and overhead.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quill.export.bundle.manifest import Graphs, Manifest, Sizes
from quill.export.verify.runner import Runner

BATCH_SIZES = (1, 8, 32)
PREFILL_TOKENS = 512
PAST_TOKENS = 64  # in every sequence before the steps that are timed
NUM_TIMES = 12
NUM_LONG_TIMES = 3


class Speed(NamedTuple):
    """Tokens a second: of decode steps by batch size, and of prefill."""

    decode: dict[int, float]
    prefill: float


def measure_baseline(sizes: Sizes) -> Speed:
    """The same batch sizes through one matrix product."""
    columns = sizes.num_parameters // sizes.d_model
    weights = np.ones((sizes.d_model, columns), np.float32)

    def tokens_a_second(batch_size: int, num_times: int) -> float:
        rows = np.ones((batch_size, sizes.d_model), np.float32)
        return batch_size / _median(lambda: rows @ weights, num_times)

    return Speed(
        decode={
            batch_size: tokens_a_second(batch_size, NUM_TIMES // 2) for batch_size in BATCH_SIZES
        },
        prefill=tokens_a_second(min(PREFILL_TOKENS, sizes.context), NUM_LONG_TIMES),
    )


def measure_speed(directory: Path, manifest: Manifest, graphs: Graphs) -> Speed:
    """The median of a few steps."""
    sizes = manifest.sizes
    num_past = min(PAST_TOKENS, sizes.context // 2)
    num_prefill = min(PREFILL_TOKENS, sizes.context)
    runner = Runner(directory, graphs, sizes, BATCH_SIZES[-1], num_prefill)
    if graphs.encoder is not None:
        runner.encode({slot: [0] * num_past for slot in range(BATCH_SIZES[-1])})
    decode = {batch_size: _decode_speed(runner, batch_size, num_past) for batch_size in BATCH_SIZES}
    seconds = _median(lambda: _prefill(runner, num_prefill), NUM_LONG_TIMES)
    return Speed(decode, num_prefill / seconds)


def _decode_speed(runner: Runner, batch_size: int, num_past: int) -> float:
    def step() -> None:
        for slot in range(batch_size):
            runner.rewind(slot, num_past)
        runner.decode([0] * batch_size)

    step()  # the first is slower
    return batch_size / _median(step, NUM_TIMES)


def _prefill(runner: Runner, num_tokens: int) -> None:
    runner.rewind(0)
    runner.prefill(0, [0] * num_tokens)


def _median(work: Callable[[], object], num_times: int) -> float:
    times = []
    for _ in range(num_times):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times))
