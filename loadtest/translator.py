"""What a benchmark of translation asks of a contender.

Knows: the shape of orders and answers. Does not know: any contender.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quill.loadtest.contender import About

MAX_NEW_TOKENS = 127


@dataclass(frozen=True)
class Translated:
    """All answers to some sources, in their order, and the time that they took together."""

    seconds: float
    answers: list[list[int]]  # without the token that ends each


class Translator(Protocol):
    about: About

    def translate(
        self, sources: Sequence[Sequence[int]], num_beams: int, num_at_once: int
    ) -> Translated:
        """So many sources at a time. One beam is greedy."""
