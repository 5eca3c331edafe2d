"""The KV cache's blocks by number: reference counts, prefix hashes, LRU eviction, and the block
table of each sequence.

Knows: numbers of blocks, tokens, sequences. Does not know: the memory behind blocks, files, steps.

A full block is cached under its prefix hash: its tokens and those of all blocks before it. So texts
with a common prefix share its blocks, within one cache scope: a client of another scope can't learn
from a quick answer what was asked in this one. A block's content doesn't depend on who wrote it, or
when: answers are shared like prompts. A cached block that no sequence uses stays until its place is
needed; the least recently used is evicted first.

With a disk cache (server/disk_cache/) a prefix goes on there. A block that is on its way from the
disk belongs to no sequence. When it has come it is a cached block as any other, and the sequences
that waited for it adopt it.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quill.server.engine.sequence import Sequence
from quill.server.outputs import DiskCacheStats
from quill.server.request import Limits, Request

PrefixHash = bytes  # of a scope, and of all tokens up to a block's last; the same in all processes
HASH_BYTES = 32  # so that nobody finds two texts with one hash


def scope_hash(scope: str) -> PrefixHash:
    """What stands before a first block."""
    content = scope.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=HASH_BYTES, person=b"scope").digest()


def next_hash(before: PrefixHash, tokens: Iterable[int]) -> PrefixHash:
    content = before + array("I", tokens).tobytes()
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A full block for as long as it is cached."""

    key: PrefixHash
    block: int
    is_valid: bool = True  # False: it may be overwritten. Other threads look


class LoadedBlock(NamedTuple):
    """A block that was to be read from the disk."""

    key: PrefixHash
    block: int
    is_good: bool


class DiskCache(Protocol):
    """Blocks that outlive the process. No call but `wait` and `close` takes longer than a look into
    a table."""

    @property
    def max_loading(self) -> int:
        """Blocks that may be on their way at once."""

    def __contains__(self, key: PrefixHash) -> bool:
        """Whether it can be read. False while the disk doesn't answer."""

    def keep(self, cached: CachedBlock, place: int) -> None:
        """The block is used: it is written, if it isn't yet. `place`: in its sequence."""

    def load(self, key: PrefixHash, block: int, place: int) -> None:
        """Begins to read into a block, which is the disk cache's until `loaded` has it."""

    def loaded(self) -> list[LoadedBlock]:
        """Since the last call."""

    def wait(self) -> None:
        """Until a few blocks have come; not for long."""

    def forget(self, keys: SequenceOf[PrefixHash]) -> None:
        """Their content isn't to be trusted."""

    def take_stats(self) -> DiskCacheStats:
        """Since the last call."""

    def close(self) -> None:
        """Writes what is left, for a few seconds at most."""


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
        self._cached: dict[int, CachedBlock] = {}  # by block

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
            self._uncache(block)
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
            return next_hash(scope_hash(scope), tokens)
        cached = self._cached.get(before)
        return None if cached is None else next_hash(cached.key, tokens)

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
        self._index[key] = block
        self._cached[block] = CachedBlock(key, block)
        return block

    def cached(self, block: int) -> CachedBlock | None:
        return self._cached.get(block)

    def forget(self, blocks: SequenceOf[int]) -> list[PrefixHash]:
        """The content of these isn't to be trusted: no sequence finds them any more."""
        keys = [self._uncache(block) for block in blocks if block in self._cached]
        for block in blocks:
            if block in self._evictable:
                del self._evictable[block]
                self._free.append(block)
        return keys

    def _uncache(self, block: int) -> PrefixHash:
        cached = self._cached.pop(block)
        cached.is_valid = False
        del self._index[cached.key]
        return cached.key


class BlockTables:
    """The blocks of sequences: prefix caching, forks, copy-on-write."""

    def __init__(self, limits: Limits, disk: DiskCache | None = None) -> None:
        self.pool = BlockPool(limits.num_blocks)
        self.block_size = limits.block_size
        self._prefix_caching = limits.prefix_caching
        self._disk = disk
        self._loading: set[PrefixHash] = set()  # on their way from the disk

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
            self._keep(block, place)
        return sequence.num_computed > before

    def load_prefix(self, sequence: Sequence, most: int) -> bool:
        """Begins to read a sequence's next blocks, up to `most` tokens, from the disk. Whether the
        next one comes: then the sequence should wait."""
        size = self.block_size
        first = sequence.num_computed // size
        if self._disk is None or sequence.num_computed % size or (first + 1) * size > most:
            return False
        key = self.prefix_hash(sequence, first)
        if key is None or key not in self._disk:
            return False
        if key in self._loading and len(self._loading) > self._disk.max_loading // 2:
            return True  # enough for now
        for place in range(first, most // size):
            is_there = key in self._loading or self.pool.find(key) is not None
            if not is_there and not self._load(key, place):
                break
            key = next_hash(key, sequence.ids((place + 1) * size, (place + 2) * size))
        return bool(self._loading)

    def _load(self, key: PrefixHash, place: int) -> bool:
        disk = self._disk
        assert disk is not None
        if key not in disk or len(self._loading) >= disk.max_loading or not self.pool.num_free:
            return False
        self._loading.add(key)
        disk.load(key, self.pool.take(), place)
        return True

    def finish_loads(self) -> None:
        """Caches the blocks that have come from the disk."""
        for loaded in self._disk.loaded() if self._disk is not None else ():
            self._loading.remove(loaded.key)
            key = loaded.key if loaded.is_good else None
            self.pool.release([self.pool.cache(key, loaded.block)])

    def wait_for_load(self) -> None:
        """Where nothing else is to do; at once, if no block is on its way."""
        if self._disk is not None and self._loading:
            self._disk.wait()

    def forget(self, blocks: SequenceOf[int]) -> None:
        """The content of these isn't to be trusted."""
        keys = self.pool.forget(blocks)
        if self._disk is not None:
            self._disk.forget(keys)

    def take_disk_stats(self) -> DiskCacheStats | None:
        return None if self._disk is None else self._disk.take_stats()

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def _keep(self, block: int, place: int) -> None:
        """On the disk."""
        if self._disk is not None and (cached := self.pool.cached(block)) is not None:
            self._disk.keep(cached, place)

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
            self._keep(sequence.blocks[place], place)
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
