"""What the engine needs of a grammar that answers keep to.

Knows: token ids, masks. Does not know: grammars, tokenizers, text: server/grammar has those.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Masks = npt.NDArray[np.uint32]  # a row for each position, a bit for each token, the lowest first


class Matcher(Protocol):
    """How far one sequence has come in its grammar: a function of the sequence's tokens alone.

    Used by one thread at a time.
    """

    @property
    def has_failed(self) -> bool:
        """The grammar became too complex to follow: no mask is known any more."""

    def jump_forward(self) -> list[int]:
        """The next tokens, as far as the grammar allows only one."""

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first, the grammar allows one after another."""

    def masks(self, draft: Sequence[int], stop_ids: Collection[int], num_unended: int) -> Masks:
        """The tokens that are allowed next, and after each of the draft tokens, which are allowed.

        In the first `num_unended` positions the stop ids are forbidden where there is any other
        token. There may be fewer masks, if a draft token leads too far; there is at least one.
        """

    def accept(self, token: int) -> None:
        """The sequence has one token more."""


class Constraint(Protocol):
    """A compiled grammar. Used by any thread."""

    def matcher(self) -> Matcher:
        """For a new sequence."""
