"""Keeps what prompts' beginnings came to, so that the next prompt needn't compute it again.

Knows: token ids, positions as opaque arrays, bytes. Does not know: slots, requests, the model.

A prompt is cut into blocks of BLOCK tokens. A block is known by its tokens and the block before
it, so prompts that begin alike share their blocks, if they are of the same scope: whoever asks in
another can't learn from a quick answer what was asked here. Only positions that prefill wrote may
be kept: what decode writes differs in the last bits, and a cache must not change an answer.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quill.server.runtime.slots import CacheArray

BLOCK = 16

# The number of the block before, or the scope if it is the first; this block's tokens.
_Key = tuple[int | str, tuple[int, ...]]


class _Block(NamedTuple):
    number: int
    positions: CacheArray


class PrefixCache:
    """The least recently used blocks go first. `max_bytes` 0 turns it off."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # From the least to the most recently used. A block is always used after those that follow
        # it (see _touch), so the oldest is never one that a kept block needs.
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()
        self.num_bytes = 0
        self._num_made = 0

    def match(self, ids: Sequence[int], scope: str = "") -> int:
        """How many of the first tokens are kept."""
        return BLOCK * len(self._path(ids, scope))

    def load(self, ids: Sequence[int], scope: str = "") -> list[CacheArray]:
        """The positions of the first tokens, block by block, as far as they are kept."""
        path = self._path(ids, scope)
        self._touch(path)
        return [self._blocks[key].positions for key in path]

    def keep(
        self, ids: Sequence[int], read: Callable[[int, int], CacheArray], scope: str = ""
    ) -> None:
        """Keeps the whole blocks of `ids`; `read(start, stop)` copies positions."""
        if not self._max_bytes:
            return
        path = self._path(ids, scope)
        number: int | str = self._blocks[path[-1]].number if path else scope
        for start in range(BLOCK * len(path), len(ids) - BLOCK + 1, BLOCK):
            positions = read(start, start + BLOCK)
            if positions.nbytes * (len(path) + 1) > self._max_bytes:
                break
            key = (number, tuple(ids[start : start + BLOCK]))
            self._num_made += 1
            number = self._num_made
            self._blocks[key] = _Block(self._num_made, positions)
            self.num_bytes += positions.nbytes
            path.append(key)
        self._touch(path)
        self._shrink()

    def _path(self, ids: Sequence[int], scope: str) -> list[_Key]:
        path: list[_Key] = []
        number: int | str = scope
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            key = (number, tuple(ids[start : start + BLOCK]))
            if key not in self._blocks:
                break
            path.append(key)
            number = self._blocks[key].number
        return path

    def _touch(self, path: Sequence[_Key]) -> None:
        for key in reversed(path):
            self._blocks.move_to_end(key)

    def _shrink(self) -> None:
        while self.num_bytes > self._max_bytes:
            _, block = self._blocks.popitem(last=False)
            self.num_bytes -= block.positions.nbytes
