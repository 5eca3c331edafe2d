"""What the engine needs of a model: a step over pieces of texts, whose caches lie in blocks.

Knows: the data of a step. Does not know: ONNX Runtime, where blocks lie.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quill.server.sampling.arrays import Hidden, Logits
from quill.server.scheduler.plan import BlockCopy, Piece, Source


class Computed(NamedTuple):
    """What came of a step, piece by piece, for each token that it was wanted of."""

    logits_LV: Logits
    hidden_MD: Hidden


class Session(Protocol):
    """A model with a pool of numbered blocks."""

    def step(self, pieces: Sequence[Piece]) -> Computed:
        """Reads each piece into its blocks.

        What it gives is good until the next step; the caller may overwrite it.
        """

    def encode(self, sources: Sequence[Source]) -> None:
        """The encoder reads sources into their blocks."""

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks. No block is both read and written, and none is written twice."""
