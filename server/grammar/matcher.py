"""Follows one answer through a grammar, token by token.

Knows: llguidance's matchers, bits. Does not know: requests, what a grammar was made from.

A matcher's state is a function of the tokens that it accepted. Guesses are tried and taken back, so
they leave no trace. The library frees the interpreter's lock while it computes masks.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import llguidance
import numpy as np

from quill.server.constraint import Masks

WORD = 32  # bits
_Answer = TypeVar("_Answer")


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """The library's panics are no Exceptions, and would end a thread that others rely on."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError("the grammar library failed") from None


class Grammar:
    """One that was compiled and tried: it is never changed, only copied."""

    def __init__(self, fresh: llguidance.LLMatcher, vocab_size: int) -> None:
        self._fresh = fresh
        self._num_words = -(-vocab_size // WORD)

    def matcher(self) -> "TokenMatcher":
        return TokenMatcher(self._fresh, self._num_words)


class TokenMatcher:
    """One answer's place in a grammar."""

    def __init__(self, fresh: llguidance.LLMatcher, num_words: int) -> None:
        self._fresh = fresh
        self._inner = fresh.deep_copy()
        self._num_words = num_words
        self._tokens: list[int] = []  # that were accepted
        self.has_failed = False

    def forced(self) -> list[int]:
        return [] if self.has_failed else self._ask(self._inner.compute_ff_tokens) or []

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return self._ask(self._inner.validate_tokens, list(tokens)) or 0

    def masks(self, guesses: Sequence[int], ends: Collection[int], num_unended: int) -> Masks:
        masks = np.zeros((len(guesses) + 1, self._num_words), np.uint32)
        for place, mask in enumerate(masks):
            self._ask(self._inner.unsafe_compute_mask_ptr, mask.ctypes.data, mask.nbytes)
            if place < len(guesses) and not self.has_failed:
                self._ask(self._inner.consume_token, guesses[place])
            if place < num_unended:
                _forbid(mask, ends)
            if self.has_failed:
                return self._without_guesses(masks, place)
        if guesses:
            self._ask(self._inner.rollback, len(guesses))
        return masks

    def _without_guesses(self, masks: Masks, num_known: int) -> Masks:
        """A guess may lead where nothing can be known: then it wasn't made. Else the answer is
        lost."""
        if num_known:
            self._inner, self.has_failed = self._fresh.deep_copy(), False
            self._ask(self._inner.consume_tokens, self._tokens)
            return masks[:num_known]
        masks[:] = 0
        return masks[:1]

    def accept(self, token: int) -> None:
        self._tokens.append(token)
        self._ask(self._inner.consume_token, token)

    def _ask(self, ask: Callable[..., _Answer], *arguments: Any) -> _Answer | None:
        """Where the library fails it allows an end, which would look like success."""
        try:
            with panics_are_errors():
                answer = ask(*arguments)
        except ValueError:
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
