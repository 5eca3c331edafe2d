"""How far results are from those of a reference.

Knows: two arrays. Does not know: who computed them.
"""

from typing import NamedTuple

import numpy as np

from quill.export.precisions import Tolerance
from quill.server.doctor.probe import Results


class Difference(NamedTuple):
    """In standard deviations of the reference's logits at the same position, as in verification at
    export; `agreement`: the share of positions whose most likely token is the same."""

    num: int
    worst: float
    mean: float
    agreement: float

    def is_within(self, tolerance: Tolerance) -> bool:
        """NaN isn't."""
        return self.worst <= tolerance.worst and self.mean <= tolerance.mean

    def __str__(self) -> str:
        if self.worst == 0:
            return f"the same bits at {self.num} positions"
        return (
            f"worst {self.worst:.2g}, mean {self.mean:.2g} of the spread, the same first choice at "
            f"{self.agreement:.0%} of {self.num} positions"
        )


def difference(found_LV: Results, expected_LV: Results) -> Difference:
    """Zero only for the same bits."""
    assert found_LV.shape == expected_LV.shape
    agreement = float(np.mean(found_LV.argmax(axis=1) == expected_LV.argmax(axis=1)))
    if np.array_equal(found_LV, expected_LV):
        return Difference(len(found_LV), 0.0, 0.0, agreement)
    spread_L1 = np.maximum(expected_LV.std(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    apart_L = (np.abs(found_LV - expected_LV) / spread_L1).max(axis=1)
    return Difference(len(found_LV), float(apart_L.max()), float(apart_L.mean()), agreement)
