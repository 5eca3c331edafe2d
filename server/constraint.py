"""What the engine asks of a form that answers keep to.

Knows: token ids, masks. Does not know: grammars, tokenizers, text: server/grammar has those.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Masks = npt.NDArray[np.uint32]  # a row for each place, a bit for each token, the lowest first


class Matcher(Protocol):
    """How far one answer has come. It depends on the answer's tokens and on nothing else.

    Used by one thread at a time.
    """

    @property
    def has_failed(self) -> bool:
        """The form turned out too complex to follow: nothing is known of the answer any more."""

    def forced(self) -> list[int]:
        """The tokens that come next, as far as there is no choice."""

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these, from the first, may come next, one after another."""

    def masks(self, guesses: Sequence[int], ends: Collection[int], num_unended: int) -> Masks:
        """What may come next, and what after each of some guesses, all of which are allowed.

        In the first places, so many, the ends are forbidden where there is anything else. There
        may be fewer than asked for, if a guess leads too far; never none.
        """

    def accept(self, token: int) -> None:
        """The answer has one token more."""


class Constraint(Protocol):
    """A form. Used by any thread."""

    def matcher(self) -> Matcher:
        """For a new answer."""
