"""Runs held-out passages through the graphs: how surprised they are, and how fast one step is.

Knows: how to feed known tokens to a runner. Does not know: PyTorch, what is acceptable.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from quill.export.verify.held_out import Passage
from quill.export.verify.pytorch_reference import Surprise, joined, surprise
from quill.export.verify.runner import Runner

NUM_TIMED_STEPS = 12


def replay(
    runner: Runner, passages: Sequence[Passage], tick: Callable[[], None] = lambda: None
) -> Surprise:
    """The surprise at all passages, in their order."""
    parts: list[Surprise] = []
    for passage in passages:
        _begin(runner, passage)
        logits_TV = runner.prefill(0, passage.ids, range(len(passage.ids)))
        parts.append(surprise(logits_TV, passage.ids))
        tick()
    return joined(parts)


def _begin(runner: Runner, passage: Passage) -> None:
    runner.rewind(0)
    if passage.source:
        runner.encode({0: passage.source})


def step_ms(runner: Runner, passage: Passage) -> float:
    """The median time of one decode step of one row, in milliseconds."""
    _begin(runner, passage)
    times = []
    for token in passage.ids[:NUM_TIMED_STEPS]:
        start = time.perf_counter()
        runner.decode([token])
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1000
