"""Finds out which tokens may come next, in threads of its own, while the model runs.

Knows: rows that keep to a form, how long it took. Does not know: the forms, the model.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from quill.server.constraint import Masks
from quill.server.machine.resources import num_cores
from quill.server.scheduler.plan import Part

MAX_THREADS = 8


@dataclass(eq=False)
class StepMasks:
    """Of one step."""

    by_place: dict[int, Masks] = field(default_factory=dict)  # among the step's parts
    duration_s: float | None = None  # until the last was made; None: nobody needed any


class MaskMaker:
    """Its threads end with it."""

    def __init__(self) -> None:
        # The model's own threads have work on all cores.
        self._num_threads = min(MAX_THREADS, max(1, num_cores() // 2))
        self._pool = ThreadPoolExecutor(self._num_threads, "masks")

    @contextmanager
    def making(self, parts: Sequence[Part]) -> Iterator[StepMasks]:
        """They are there when the block has ended, however it ended."""
        wanted = [
            (place, part)
            for place, part in enumerate(parts)
            if part.takers and part.takers[0].matcher is not None
        ]
        made, began_s = StepMasks(), time.perf_counter()
        shares = [wanted[first :: self._num_threads] for first in range(self._num_threads)]
        futures = [self._pool.submit(_make, share) for share in shares if share]
        try:
            yield made
        finally:
            results = [future.result() for future in futures]
        for masks, ended_s in results:
            made.by_place |= masks
            made.duration_s = max(made.duration_s or 0.0, ended_s - began_s)


def _make(wanted: Sequence[tuple[int, Part]]) -> tuple[dict[int, Masks], float]:
    """And when they were there."""
    masks = {place: part.takers[0].masks(part.guesses) for place, part in wanted}
    return masks, time.perf_counter()
