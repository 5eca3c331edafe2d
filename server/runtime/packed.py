"""What a step reads, as arrays: texts packed one after another.

Knows: numpy, how arrays are bound. Does not know: which graph reads them.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from quill.server.runtime.blocks import bind, view_of

Inputs = dict[str, npt.NDArray[Any]]


def run_bound(session: Any, binding: Any, inputs: Inputs) -> None:
    for name, array in inputs.items():
        bind(binding.bind_input, name, view_of(array))
    session.run_with_iobinding(binding)


def longs(numbers: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(numbers, np.int64)


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each text begins, and where the last one ends."""
    return list(accumulate(lengths, initial=0))


def positions(starts: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    return longs(
        chain.from_iterable(
            range(start, start + length) for start, length in zip(starts, lengths, strict=True)
        )
    )


def indices(firsts: Sequence[int], wanted: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Of all packed tokens those that are wanted of each text."""
    return longs(
        first + place for first, places in zip(firsts, wanted, strict=False) for place in places
    )
