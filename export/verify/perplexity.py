"""Runs held-out passages through the graphs: how surprised they are, and how fast one step is.

Knows: how to feed known tokens to a runner. Does not know: PyTorch, what is acceptable.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from quill.export.verify.held_out import Passage
from quill.export.verify.pytorch_reference import Surprise, joined, surprise
from quill.export.verify.runner import Runner

NUM_TIMED_STEPS = 12


def replay(
    runner: Runner,
    passages: Sequence[Passage],
    num_slots: int,
    tick: Callable[[], None] = lambda: None,
) -> Surprise:
    """The surprise at all passages, in their order."""
    parts: list[Surprise] = []
    group = num_slots if passages[0].source else 1
    for start in range(0, len(passages), group):
        some = passages[start : start + group]
        parts += _decoded(runner, some) if some[0].source else [_prefilled(runner, some[0])]
        for _ in some:
            tick()
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
