"""What the engine needs of a model: a step over pieces of texts, whose caches lie in blocks.

Knows: the data of a step. Does not know: ONNX Runtime, where blocks lie.
"""

from collections.abc import Sequence
from typing import Protocol

from quill.server.sampling.arrays import Logits
from quill.server.scheduler.plan import BlockCopy, Piece, Source


class Session(Protocol):
    """A model with a pool of numbered blocks."""

    def step(self, pieces: Sequence[Piece]) -> Logits:
        """Reads each piece into its blocks. Logits after all wanted tokens, piece by piece.

        They are good until the next step; the caller may overwrite them.
        """

    def encode(self, sources: Sequence[Source]) -> None:
        """The encoder reads sources into their blocks."""

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks. No block is both read and written, and none is written twice."""
