"""The pool of blocks that caches are made of: who holds which, and what lies in those that nobody
holds any more.

Knows: numbers of blocks, tokens. Does not know: the memory behind them, requests, steps.

A full block is known by its tokens and the block before it, so texts that begin alike share their
blocks, if they are of the same scope: whoever asks in another can't learn from a quick answer what
was asked here. What a block holds doesn't depend on who wrote it, or when: answers are shared like
prompts. A known block that nobody holds stays until its place is needed, least recently used first.
"""

from collections import OrderedDict
from collections.abc import Sequence

# The number of the block before, or the scope if it is the first; this block's tokens.
Key = tuple[int | str, tuple[int, ...]]


class BlockPool:
    """Blocks are numbered from 0. Whoever takes or shares one releases it once."""

    def __init__(self, num_blocks: int) -> None:
        self._counts = [0] * num_blocks  # how many hold each
        self._free = list(range(num_blocks))[::-1]  # held by nobody, and nothing is known of them
        # Held by nobody, but known; the least recently used first. Whoever holds a block holds all
        # that come before it, and releases it first: so the oldest never has one that follows it.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._index: dict[Key, int] = {}
        self._known: dict[int, tuple[Key, int]] = {}  # by block: its key, and a name for keys
        self._num_known = 0  # so far: a block that is used anew must not be taken for the old one

    @property
    def num_free(self) -> int:
        """How many can be taken."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return len(self._counts) - self.num_free

    def is_shared(self, block: int) -> bool:
        return self._counts[block] > 1

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def take(self) -> int:
        """A block whose content means nothing."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._index[self._known.pop(block)[0]]
        self._counts[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not self._counts[block]:
                del self._idle[block]  # an error if it is free: then it holds nothing
            self._counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """The blocks of one text, from its first, or its last few."""
        for block in reversed(blocks):
            self._counts[block] -= 1
            assert self._counts[block] >= 0, "released twice"
            if self._counts[block]:
                continue
            if block in self._known:
                self._idle[block] = None
            else:
                self._free.append(block)

    def key(self, scope: str, before: int | None, tokens: tuple[int, ...]) -> Key | None:
        """What a block of these tokens is known by. None: the one before isn't known."""
        if before is None:
            return scope, tokens
        known = self._known.get(before)
        return None if known is None else (known[1], tokens)

    def find(self, key: Key | None) -> int | None:
        return None if key is None else self._index.get(key)

    def keep(self, key: Key | None, block: int) -> int:
        """Makes a full block known. If its like is known, that one is held from now on instead."""
        if key is None or block in self._known:
            return block
        like = self._index.get(key)
        if like is not None:
            self.share([like])
            self.release([block])
            return like
        self._num_known += 1
        self._index[key] = block
        self._known[block] = key, self._num_known
        return block

    def forget(self, blocks: Sequence[int]) -> None:
        """What these hold is not to be trusted: nobody finds them any more."""
        for block in blocks:
            known = self._known.pop(block, None)
            if known is not None:
                del self._index[known[0]]
                if block in self._idle:
                    del self._idle[block]
                    self._free.append(block)
