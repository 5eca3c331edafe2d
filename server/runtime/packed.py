"""What a step reads, as arrays: texts packed one after another.

Knows: numpy, how arrays are bound. Does not know: which graph reads them, blocks.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from quill.server.runtime.blocks import View, bind, view_of

Inputs = dict[str, npt.NDArray[Any]]


class BoundGraph:
    """A graph, with what it reads and writes.

    Binding an array takes longer than copying a step's few numbers to where those of the step
    before lie, if there are as many. A device copies inputs when they are bound and never looks at
    them again, so there (`rebinds`) each is bound for each step.
    """

    def __init__(self, session: Any, *, rebinds: bool = False) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._rebinds = rebinds
        self._inputs: Inputs = {}
        self._outputs: dict[str, View] = {}

    def bind_in_place(self, name: str, extended: str, view: View) -> None:
        """For good: memory that is read as one name and written as the other."""
        bind(self._binding.bind_input, name, view)
        bind(self._binding.bind_output, extended, view)

    def run(self, inputs: Inputs, outputs: Inputs) -> None:
        for name, array in inputs.items():
            held = self._inputs.get(name)
            if held is not None and held.shape == array.shape and not self._rebinds:
                held[...] = array
            else:
                bind(self._binding.bind_input, name, view_of(array))
                self._inputs[name] = array
        for name, array in outputs.items():
            view = view_of(array)
            if self._outputs.get(name) != view:
                bind(self._binding.bind_output, name, view)
                self._outputs[name] = view
        self._session.run_with_iobinding(self._binding)


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
