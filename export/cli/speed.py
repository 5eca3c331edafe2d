"""How fast a bundle's graphs are on this machine, with nothing around them.

Knows: decode steps of 1, 8 and 32 rows, a prefill, and a yardstick. Does not know: servers.

Tokens a second mean little without the machine, and less while something else runs on it. So they
stand beside a yardstick taken in the same minute: one bare matrix product in float32 with as many
weights as the network has. That is what a step would be without attention, norms and overhead.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quill.export.bundle.manifest import Graphs, Manifest, Sizes
from quill.export.verify.runner import Runner

ROWS = (1, 8, 32)
PREFILL_TOKENS = 512
PAST_TOKENS = 64  # in every row before the steps that are timed
NUM_TIMES = 12
NUM_LONG_TIMES = 3


class Speed(NamedTuple):
    """Tokens a second: of decode steps by their number of rows, and of prefill."""

    decode: dict[int, float]
    prefill: float


def measure_baseline(sizes: Sizes) -> Speed:
    """The same numbers of rows through one matrix product."""
    columns = sizes.num_parameters // sizes.d_model
    weights = np.ones((sizes.d_model, columns), np.float32)

    def tokens_a_second(num_rows: int, num_times: int) -> float:
        rows = np.ones((num_rows, sizes.d_model), np.float32)
        return num_rows / _median(lambda: rows @ weights, num_times)

    return Speed(
        decode={num_rows: tokens_a_second(num_rows, NUM_TIMES // 2) for num_rows in ROWS},
        prefill=tokens_a_second(min(PREFILL_TOKENS, sizes.context), NUM_LONG_TIMES),
    )


def measure_speed(directory: Path, manifest: Manifest, graphs: Graphs) -> Speed:
    """The median of a few steps."""
    sizes = manifest.sizes
    num_past = min(PAST_TOKENS, sizes.context // 2)
    num_prefill = min(PREFILL_TOKENS, sizes.context)
    runner = Runner(directory, graphs, sizes, ROWS[-1], num_prefill)
    if graphs.encoder is not None:
        runner.encode({slot: [0] * num_past for slot in range(ROWS[-1])})
    decode = {num_rows: _decode_speed(runner, num_rows, num_past) for num_rows in ROWS}
    seconds = _median(lambda: _prefill(runner, num_prefill), NUM_LONG_TIMES)
    return Speed(decode, num_prefill / seconds)


def _decode_speed(runner: Runner, num_rows: int, num_past: int) -> float:
    def step() -> None:
        for slot in range(num_rows):
            runner.rewind(slot, num_past)
        runner.decode([0] * num_rows)

    step()  # the first is slower
    return num_rows / _median(step, NUM_TIMES)


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
