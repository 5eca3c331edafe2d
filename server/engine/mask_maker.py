"""Finds out which tokens may come next, in threads of its own, while the model runs.

Knows: rows that keep to a form. Does not know: the forms, the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from quill.server.constraint import Masks
from quill.server.machine.resources import num_cores
from quill.server.scheduler.plan import Part

MAX_THREADS = 8


class MaskMaker:
    """Its threads end with it."""

    def __init__(self) -> None:
        # The model's own threads have work on all cores.
        self._num_threads = min(MAX_THREADS, max(1, num_cores() // 2))
        self._pool = ThreadPoolExecutor(self._num_threads, "masks")

    @contextmanager
    def making(self, parts: Sequence[Part]) -> Iterator[Mapping[int, Masks]]:
        """By the parts' places. They are there when the block has ended, however it ended."""
        wanted = [
            (place, part)
            for place, part in enumerate(parts)
            if part.takers and part.takers[0].matcher is not None
        ]
        found: dict[int, Masks] = {}
        shares = [wanted[first :: self._num_threads] for first in range(self._num_threads)]
        futures = [self._pool.submit(_make, share) for share in shares if share]
        try:
            yield found
        finally:
            results = [future.result() for future in futures]
        for result in results:
            found |= result


def _make(wanted: Sequence[tuple[int, Part]]) -> dict[int, Masks]:
    return {place: part.takers[0].masks(part.guesses) for place, part in wanted}
