"""A text's vector, as the hidden states of its tokens come.

Knows: hidden states, the three ways to make one vector of them. Does not know: steps, requests.

A mean is added up in float64, strictly one token after another: so it is the same bits wherever the
text was cut into pieces.
"""

import numpy as np
import numpy.typing as npt

from quill.server.request import Pooling
from quill.server.sampling.arrays import Hidden

# M tokens · D model size


class Pooled:
    """One text, or some of its tokens. `num_seen` have come; they come in order, but some may come
    again."""

    def __init__(self, pooling: Pooling, of: range) -> None:
        self._of = {"mean": of, "first": of[:1], "last": of[-1:]}[pooling]
        self._sum_D: npt.NDArray[np.float64] | None = None
        self.num_seen = 0

    def wanted(self, start: int, stop: int) -> range:
        """Whose hidden states it needs, of the tokens that a step reads."""
        start = max(start, self.num_seen, self._of.start)
        return range(start, max(start, min(stop, self._of.stop)))

    def add(self, hidden_MD: Hidden, stop: int) -> None:
        """What was wanted of the tokens up to `stop`."""
        self.num_seen = max(self.num_seen, stop)
        if not len(hidden_MD):
            return
        rows_MD = hidden_MD.astype(np.float64)
        if self._sum_D is not None:
            rows_MD = np.concatenate([self._sum_D[None], rows_MD])
        # `sum` may add in another order; `accumulate` can't.
        self._sum_D = np.add.accumulate(rows_MD, axis=0)[-1]

    def vector_D(self) -> Hidden:
        """Once all of the text was read."""
        assert self._sum_D is not None
        return (self._sum_D / len(self._of)).astype(np.float32)
