"""The KV cache's blocks by number: reference counts, prefix hashes, LRU eviction, and the block
table of each sequence.

Knows: numbers of blocks, tokens, sequences. Does not know: the memory behind blocks, steps.

A full block is cached under its prefix hash: its tokens and the block before it. So texts with a
common prefix share its blocks, within one cache scope: a client of another scope can't learn from a
quick answer what was asked in this one. A block's content doesn't depend on who wrote it, or when:
answers are shared like prompts. A cached block that no sequence uses stays until its place is
needed; the least recently used is evicted first.
"""

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from quill.server.engine.sequence import Sequence
from quill.server.request import Limits, Request

# The id of the block before, or the scope if it is the first; this block's tokens.
PrefixHash = tuple[int | str, tuple[int, ...]]


class BlockPool:
    """Blocks are numbered from 0. Each `take` or `share` needs one `release`."""

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks))[::-1]  # used by no sequence, and not cached
        # Cached, used by no sequence; the least recently used first. A sequence uses all blocks
        # before a block of its own, and releases that first: no block is evicted before those
        # that follow it.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._index: dict[PrefixHash, int] = {}
        self._cached: dict[int, tuple[PrefixHash, int]] = {}  # by block: its hash, its id in hashes
        self._num_ids = 0  # a block that is written anew has another id in its followers' hashes

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return len(self._ref_counts) - self.num_free

    def is_shared(self, block: int) -> bool:
        return self._ref_counts[block] > 1

    def is_evictable(self, block: int) -> bool:
        return block in self._evictable

    def take(self) -> int:
        """A block whose content means nothing."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            del self._index[self._cached.pop(block)[0]]
        self._ref_counts[block] = 1
        return block

    def share(self, blocks: SequenceOf[int]) -> None:
        for block in blocks:
            if not self._ref_counts[block]:
                del self._evictable[block]  # an error if it is free: then it has no content
            self._ref_counts[block] += 1

    def release(self, blocks: SequenceOf[int]) -> None:
        """The blocks of one sequence, from its first, or its last few."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, "released twice"
            if self._ref_counts[block]:
                continue
            if block in self._cached:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def prefix_hash(
        self, scope: str, before: int | None, tokens: tuple[int, ...]
    ) -> PrefixHash | None:
        """Of a block of these tokens. None: the block before isn't cached."""
        if before is None:
            return scope, tokens
        cached = self._cached.get(before)
        return None if cached is None else (cached[1], tokens)

    def find(self, key: PrefixHash | None) -> int | None:
        return None if key is None else self._index.get(key)

    def cache(self, key: PrefixHash | None, block: int) -> int:
        """Caches a full block. Returns the block to use: an equal one, if that was cached."""
        if key is None or block in self._cached:
            return block
        equal = self._index.get(key)
        if equal is not None:
            self.share([equal])
            self.release([block])
            return equal
        self._num_ids += 1
        self._index[key] = block
        self._cached[block] = key, self._num_ids
        return block

    def forget(self, blocks: SequenceOf[int]) -> None:
        """The content of these isn't to be trusted: no sequence finds them any more."""
        for block in blocks:
            cached = self._cached.pop(block, None)
            if cached is not None:
                del self._index[cached[0]]
                if block in self._evictable:
                    del self._evictable[block]
                    self._free.append(block)


class BlockTables:
    """The blocks of sequences: prefix caching, forks, copy-on-write."""

    def __init__(self, limits: Limits) -> None:
        self.pool = BlockPool(limits.num_blocks)
        self.block_size = limits.block_size
        self._prefix_caching = limits.prefix_caching

    def prefix_hash(self, sequence: Sequence, place: int) -> PrefixHash | None:
        """Of one of a sequence's blocks, all of whose tokens are there."""
        if not self._prefix_caching:
            return None
        tokens = sequence.ids(place * self.block_size, (place + 1) * self.block_size)
        before = sequence.blocks[place - 1] if place else None
        return self.pool.prefix_hash(sequence.request.cache_scope, before, tokens)

    def num_shareable(self, request: Request) -> int:
        """Blocks of a prompt's prefix that running sequences use."""
        num, before, size = 0, None, self.block_size
        if request.prompt_logprobs is not None or request.source_ids is not None:
            return 0  # a pooling request has no prompt
        for start in range(0, len(request.prompt_ids) - size, size):
            tokens = request.prompt_ids[start : start + size]
            before = self.pool.find(self.pool.prefix_hash(request.cache_scope, before, tokens))
            if before is None:
                break
            num += not self.pool.is_evictable(before)
        return num

    def adopt_prefix(self, sequence: Sequence, most: int) -> bool:
        """Uses cached blocks for a sequence's next tokens, up to `most`. Whether there were any."""
        size, before = self.block_size, sequence.num_computed
        while sequence.num_computed + size <= most and not sequence.num_computed % size:
            place = sequence.num_computed // size
            block = self.pool.find(self.prefix_hash(sequence, place))
            if block is None:
                break
            self.pool.share([block])
            self.pool.release(sequence.blocks[place:])
            sequence.blocks[place:] = [block]
            sequence.num_computed += size
            sequence.num_cached_blocks = place + 1
        return sequence.num_computed > before

    def needs_copy(self, sequence: Sequence) -> bool:
        """Copy-on-write: the block that is written next is another sequence's, too."""
        place = sequence.num_computed // self.block_size
        return place < len(sequence.blocks) and self.pool.is_shared(sequence.blocks[place])

    def copy_on_write(self, sequence: Sequence) -> tuple[int, int]:
        """Gives a sequence a block of its own to write. Returns from where to where to copy."""
        place = sequence.num_computed // self.block_size
        source, target = sequence.blocks[place], self.pool.take()
        self.pool.release([source])
        sequence.blocks[place] = target
        return source, target

    def set_computed(self, sequence: Sequence, num_computed: int) -> None:
        """So many tokens are in the blocks: the full blocks are cached."""
        sequence.num_computed = num_computed
        if sequence.request.source_ids is not None:
            return  # their content depends on the source
        num_full = num_computed // self.block_size
        for place in range(sequence.num_cached_blocks, num_full):
            key = self.prefix_hash(sequence, place)
            sequence.blocks[place] = self.pool.cache(key, sequence.blocks[place])
        sequence.num_cached_blocks = num_full

    def fork(self, sequences: SequenceOf[Sequence], parents: SequenceOf[int]) -> None:
        """Sequence i continues from the blocks of sequence parents[i]; writes copy them later."""
        before = [(each.blocks, each.num_computed, each.num_cached_blocks) for each in sequences]
        for place, (sequence, parent) in enumerate(zip(sequences, parents, strict=True)):
            if place != parent:
                blocks, sequence.num_computed, sequence.num_cached_blocks = before[parent]
                self.pool.share(blocks)
                sequence.blocks = blocks.copy()
        for place, parent in enumerate(parents):
            if place != parent:
                self.pool.release(before[place][0])
