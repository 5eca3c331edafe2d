"""Follows one answer through a grammar, token by token.

Knows: llguidance's matchers, bits. Does not know: requests, what a grammar was made from.

A matcher's state is a function of the tokens that it accepted. Guesses are tried and taken back, so
they leave no trace. The library frees the interpreter's lock while it makes matchers and masks, and
holds it for all else.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import llguidance
import numpy as np

from quill.server.constraint import Masks

WORD = 32  # bits
MAX_RENEWAL_S = 0.02
MAX_FORCED = 64  # tokens that are told at once


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """The library's panics are no Exceptions, and would end a thread that others rely on."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ValueError("the grammar library failed") from None


def is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


class Grammar:
    """One that was compiled and tried. It is never changed, only copied.

    Copies share their lexer, and all that it has learnt: that makes masks fast, and one day it is
    full. So an answer at which the shared one fails gets one of its own, if that takes no longer
    than a step may: how far an answer can be followed depends on its own tokens alone. Then the
    grammar is worn out, and who comes next needs a new one.
    """

    def __init__(self, make: Callable[[], llguidance.LLMatcher], vocab_size: int) -> None:
        """`make` may fail: ask whether it `is_error`."""
        began_s = time.thread_time()
        self.fresh = make()
        self._make = make
        self._is_slow = time.thread_time() - began_s > MAX_RENEWAL_S
        self.num_words = -(-vocab_size // WORD)
        self.is_worn_out = False

    def matcher(self) -> "TokenMatcher":
        return TokenMatcher(self)

    def renewed(self) -> llguidance.LLMatcher | None:
        """With a lexer that nobody has used."""
        self.is_worn_out = True
        try:
            with panics_are_errors():
                return None if self._is_slow else self._make()
        except ValueError:
            return None


class TokenMatcher:
    """One answer's place in a grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._base = grammar.fresh
        self._inner = self._base.deep_copy()
        self._has_own = False  # a lexer that nobody shares
        self._tokens: list[int] = []  # that were accepted
        self._forced: deque[int] | None = None  # None: it isn't known
        self.has_failed = False

    def forced(self) -> list[int]:
        if self._forced is None and not self.has_failed:
            self._forced = deque(self._ask("compute_ff_tokens") or ())
            self._mend()
        return list(islice(self._forced or (), MAX_FORCED))

    def num_allowed(self, tokens: Sequence[int]) -> int:
        num = 0 if self.has_failed else self._ask("validate_tokens", list(tokens)) or 0
        self._mend()
        return num

    def masks(self, guesses: Sequence[int], ends: Collection[int], num_unended: int) -> Masks:
        masks = np.zeros((len(guesses) + 1, self._grammar.num_words), np.uint32)
        for place, mask in enumerate(masks):
            if place:
                self._ask("consume_token", guesses[place - 1])
            self._fill(mask)
            if self.has_failed and place:
                self._read_again()  # the guess led where nothing can be known: it wasn't made
                return masks[:place]
            if self.has_failed:
                self._mend()
                self._fill(mask)
            if self.has_failed:
                mask[:] = 0
                return masks[:1]
            if place < num_unended:
                _forbid(mask, ends)
        if guesses:
            self._ask("rollback", len(guesses))
        return masks

    def _fill(self, mask: Masks) -> None:
        if not self.has_failed:
            self._ask("unsafe_compute_mask_ptr", mask.ctypes.data, mask.nbytes)

    def accept(self, token: int) -> None:
        self._tokens.append(token)
        self._follow(token)
        if not self.has_failed:
            self._ask("consume_token", token)
            self._mend()

    def _follow(self, token: int) -> None:
        """What is forced is long in some forms, and needn't be worked out for each token."""
        if self._forced and self._forced[0] == token:
            self._forced.popleft()
        else:
            self._forced = None
        self._forced = self._forced or None

    def _mend(self) -> None:
        """After a failure: another lexer, of its own. Once."""
        if not self.has_failed or self._has_own:
            return
        renewed, self._has_own = self._grammar.renewed(), True
        if renewed is not None:
            self._base = renewed
            self._read_again()

    def _read_again(self) -> None:
        self._inner, self.has_failed, self._forced = self._base.deep_copy(), False, None
        self._ask("consume_tokens", self._tokens)
        self._mend()

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Where the library fails it allows an end, which would look like success."""
        try:
            answer = getattr(self._inner, name)(*arguments)
        except BaseException as error:
            if not isinstance(error, ValueError) and not is_panic(error):
                raise
            self.has_failed = True
            return None
        self.has_failed = self.has_failed or self._inner.is_error()
        return answer


def _forbid(mask: Masks, tokens: Collection[int]) -> None:
    """Unless there is nothing else."""
    before = mask.copy()
    for token in tokens:
        mask[token // WORD] &= np.uint32(~(1 << token % WORD) & 0xFFFFFFFF)
    if not mask.any():
        mask[:] = before
