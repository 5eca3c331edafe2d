"""Follows one sequence through a grammar, token by token, and makes the masks of what may follow.

Knows: llguidance's matchers, bits. Does not know: requests, what a grammar was compiled from.

A matcher's state is a function of the tokens that it accepted. Draft tokens are tried and rolled
back. The library frees the interpreter's lock while it makes matchers and masks, and holds it for
everything else.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import llguidance
import numpy as np

from quill.server.request import Masks

WORD = 32  # bits
MAX_RENEWAL_S = 0.02
MAX_JUMP_FORWARD = 64  # tokens that are given at once
# That the library may compute at once, which holds the interpreter's lock: 1,000 take 2 ms. Its
# limits end the first time of a grammar that has more at 6,662 of SmolLM2's tokens, after 30 ms.
MAX_COMPUTED = 1024


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


class TokenGrammar:
    """A compiled grammar. It is never changed, only copied.

    Copies share one lexer with all states that it has found: that makes masks fast, until the lexer
    is full. A sequence at which the shared lexer fails gets one of its own, if making it takes no
    longer than a step may: how far a sequence can be followed depends on its own tokens alone. Then
    the grammar is worn out, and the next request compiles a new one.
    """

    def __init__(self, make: Callable[[], llguidance.LLMatcher], vocab_size: int) -> None:
        """`make` may fail: then its result `is_error`."""
        began_s = time.thread_time()
        self.fresh = make()
        self._make = make
        self._is_slow = time.thread_time() - began_s > MAX_RENEWAL_S
        self.num_words = -(-vocab_size // WORD)
        self.is_worn_out = False
        self.jumps = True  # False: it once determined too many tokens at once

    def matcher(self) -> "TokenMatcher":
        return TokenMatcher(self)

    def renewed(self) -> llguidance.LLMatcher | None:
        """With an unused lexer."""
        self.is_worn_out = True
        try:
            with panics_are_errors():
                return None if self._is_slow else self._make()
        except ValueError:
            return None


class TokenMatcher:
    """One sequence's place in a grammar."""

    def __init__(self, grammar: TokenGrammar) -> None:
        self._grammar = grammar
        self._base = grammar.fresh
        self._inner = self._base.deep_copy()
        self._has_own = False  # a lexer that isn't shared
        self._tokens: list[int] = []  # accepted so far
        self._jump_forward: deque[int] | None = None  # jump-forward tokens; None: not computed
        self.has_failed = False
        self.num_computed = 0  # jump-forward tokens

    def jump_forward(self) -> list[int]:
        if self._jump_forward is None and not self.has_failed and self._grammar.jumps:
            self._jump_forward = deque(self._call("compute_ff_tokens") or ())
            self._grammar.jumps = len(self._jump_forward) <= MAX_COMPUTED
            self.num_computed += len(self._jump_forward)
            self._renew()
        return list(islice(self._jump_forward or (), MAX_JUMP_FORWARD))

    def num_allowed(self, tokens: Sequence[int]) -> int:
        num = 0 if self.has_failed else self._call("validate_tokens", list(tokens)) or 0
        self._renew()
        return num

    def masks(self, draft: Sequence[int], stop_ids: Collection[int], num_unended: int) -> Masks:
        masks = np.zeros((len(draft) + 1, self._grammar.num_words), np.uint32)
        for place, mask in enumerate(masks):
            if place:
                self._call("consume_token", draft[place - 1])
            self._fill(mask)
            if self.has_failed and place:
                self._replay()  # the lexer gave up after this draft token: it is dropped
                return masks[:place]
            if self.has_failed:
                self._renew()
                self._fill(mask)
            if self.has_failed:
                mask[:] = 0
                return masks[:1]
            if place < num_unended:
                _forbid(mask, stop_ids)
        if draft:
            self._call("rollback", len(draft))
        return masks

    def _fill(self, mask: Masks) -> None:
        if not self.has_failed:
            self._call("unsafe_compute_mask_ptr", mask.ctypes.data, mask.nbytes)

    def accept(self, token: int) -> None:
        self._tokens.append(token)
        self._advance(token)
        if not self.has_failed:
            self._call("consume_token", token)
            self._renew()

    def _advance(self, token: int) -> None:
        """Jump-forward tokens are many in some grammars, and aren't computed for each token."""
        if self._jump_forward and self._jump_forward[0] == token:
            self._jump_forward.popleft()
        else:
            self._jump_forward = None
        self._jump_forward = self._jump_forward or None

    def _renew(self) -> None:
        """After a failure: another lexer, not shared. Once."""
        if not self.has_failed or self._has_own:
            return
        renewed, self._has_own = self._grammar.renewed(), True
        if renewed is not None:
            self._base = renewed
            self._replay()

    def _replay(self) -> None:
        self._inner, self.has_failed, self._jump_forward = self._base.deep_copy(), False, None
        self._call("consume_tokens", self._tokens)
        self._renew()

    def _call(self, name: str, *arguments: Any) -> Any:
        """After a failure the library allows EOS, which would look like success: it has failed."""
        try:
            result = getattr(self._inner, name)(*arguments)
        except BaseException as error:
            if not isinstance(error, ValueError) and not is_panic(error):
                raise
            self.has_failed = True
            return None
        self.has_failed = self.has_failed or self._inner.is_error()
        return result


def _forbid(mask: Masks, tokens: Collection[int]) -> None:
    """Unless there is nothing else."""
    before = mask.copy()
    for token in tokens:
        mask[token // WORD] &= np.uint32(~(1 << token % WORD) & 0xFFFFFFFF)
    if not mask.any():
        mask[:] = before
