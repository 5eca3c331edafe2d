"""Follows one answer through a grammar, token by token.

Knows: llguidance's matchers, bits. Does not know: requests, what a grammar was made from.

A matcher's state is a function of the tokens that it accepted. Guesses are tried and taken back, so
they leave no trace. The library frees the interpreter's lock while it computes masks.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import llguidance
import numpy as np

from quill.server.constraint import Masks

WORD = 32  # bits


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
        return TokenMatcher(self._fresh.deep_copy(), self._num_words)


class TokenMatcher:
    """One answer's place in a grammar."""

    def __init__(self, inner: llguidance.LLMatcher, num_words: int) -> None:
        self._inner = inner
        self._num_words = num_words

    @property
    def has_failed(self) -> bool:
        return bool(self._inner.is_error())

    def forced(self) -> list[int]:
        return list(self._inner.compute_ff_tokens())

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return int(self._inner.validate_tokens(list(tokens)))

    def masks(self, guesses: Sequence[int], ends: Collection[int], num_unended: int) -> Masks:
        masks = np.zeros((len(guesses) + 1, self._num_words), np.uint32)
        num_tried = 0
        for place, mask in enumerate(masks):
            self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self.has_failed:  # then the library allows the end, which would look like success
                break
            if place < num_unended:
                _forbid(mask, ends)
            if place < len(guesses):
                num_tried += self._inner.try_consume_tokens([guesses[place]])
        if num_tried and not self.has_failed:
            self._inner.rollback(num_tried)
        return masks

    def accept(self, token: int) -> None:
        self._inner.consume_token(token)


def _forbid(mask: Masks, tokens: Collection[int]) -> None:
    """Unless there is nothing else."""
    before = mask.copy()
    for token in tokens:
        mask[token // WORD] &= np.uint32(~(1 << token % WORD) & 0xFFFFFFFF)
    if not mask.any():
        mask[:] = before
