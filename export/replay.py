"""Runs held-out passages through the graphs: how surprised they are, and how fast one step is.

Knows: how to feed known tokens to a runner. Does not know: PyTorch, what is acceptable.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np

from export.held_out import Passage
from export.oracle import Surprise, joined, surprise
from export.runner import Runner

NUM_TIMED_STEPS = 12


def replay(runner: Runner, passages: Sequence[Passage], num_slots: int) -> Surprise:
    """The surprise at all passages, in their order."""
    if not passages[0].source:
        return joined([_prefilled(runner, passage) for passage in passages])
    parts: list[Surprise] = []
    for start in range(0, len(passages), num_slots):
        parts += _decoded(runner, passages[start : start + num_slots])
    return joined(parts)


def _prefilled(runner: Runner, passage: Passage) -> Surprise:
    runner.rewind(0)
    return surprise(runner.prefill(0, passage.ids, range(len(passage.ids))), passage.ids)


def _decoded(runner: Runner, passages: Sequence[Passage]) -> Iterator[Surprise]:
    """All passages side by side, the longest in the first slot, so that rows end at the end."""
    order = sorted(range(len(passages)), key=lambda i: -len(passages[i].ids))
    longest = [passages[i] for i in order]
    for slot, passage in enumerate(longest):
        runner.rewind(slot)
        runner.encode(slot, passage.source)
    logits: list[list[np.ndarray]] = [[] for _ in passages]
    for position in range(len(longest[0].ids)):
        rows = [passage.ids[position] for passage in longest if position < len(passage.ids)]
        for slot, row_V in enumerate(runner.decode(rows)):
            logits[order[slot]].append(row_V)
    for passage, rows_V in zip(passages, logits, strict=True):
        yield surprise(np.stack(rows_V), passage.ids)


def step_ms(runner: Runner, passage: Passage) -> float:
    """The median time of one decode step of one row, in milliseconds."""
    runner.rewind(0)
    if passage.source:
        runner.encode(0, passage.source)
    times = []
    for token in passage.ids[:NUM_TIMED_STEPS]:
        start = time.perf_counter()
        runner.decode([token])
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1000
