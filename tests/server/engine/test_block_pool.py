"""Blocks: none is lost, none given away twice, none known to another scope."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.server.engine.block_pool import BlockPool

SIZE = 2


class Texts:
    """Texts over a pool, each with its blocks, and what was really written into each block."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.held: list[list[int]] = []
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}  # scope, the text so far

    def read(self, scope: str, text: tuple[int, ...]) -> int:
        """Takes over what is known, writes the rest; as far as there are blocks."""
        blocks: list[int] = []
        num_found = 0
        for stop in range(SIZE, len(text) + 1, SIZE):
            key = self.pool.prefix_hash(
                scope, blocks[-1] if blocks else None, text[stop - SIZE : stop]
            )
            found = self.pool.find(key)
            if found is not None:
                assert self.written[found] == (scope, text[:stop]), "it holds another text"
                self.pool.share([found])
                num_found += 1
            elif self.pool.num_free:
                found = self.pool.take()
                self.written[found] = scope, text[:stop]
                found = self.pool.cache(key, found)
            else:
                break
            blocks.append(found)
        self.held.append(blocks)
        return num_found

    def fork(self, place: int) -> None:
        self.pool.share(self.held[place])
        self.held.append(self.held[place].copy())

    def forget(self, place: int) -> None:
        self.pool.forget(self.held[place])

    def end(self, place: int) -> None:
        self.pool.release(self.held.pop(place))

    def check(self) -> None:
        counts = Counter(block for blocks in self.held for block in blocks)
        assert self.pool.num_used == len(counts)
        assert self.pool.num_free == self.num_blocks - len(counts)
        for block, count in counts.items():
            assert self.pool.is_shared(block) == (count > 1)


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
ACTIONS = st.one_of(
    st.tuples(st.just("read"), st.sampled_from(["", "a", "b"]), TEXTS),
    st.tuples(st.just("fork"), st.integers(0, 9), st.none()),
    st.tuples(st.just("forget"), st.integers(0, 9), st.none()),
    st.tuples(st.just("end"), st.integers(0, 9), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 10), st.lists(ACTIONS, max_size=60))
def test_no_block_is_lost_or_given_twice_or_found_by_another_scope(
    num_blocks: int, actions: list[tuple[str, str | int, tuple[int, ...]]]
) -> None:
    texts = Texts(num_blocks)
    for kind, what, text in actions:
        if isinstance(what, str):
            texts.read(what, text)
        elif what < len(texts.held):
            {"fork": texts.fork, "forget": texts.forget, "end": texts.end}[kind](what)
        texts.check()
    while texts.held:
        texts.end(0)
    assert texts.pool.num_free == num_blocks
    assert sorted(texts.pool.take() for _ in range(num_blocks)) == list(range(num_blocks))


def test_what_was_released_is_found_until_its_place_is_needed_oldest_first() -> None:
    texts = Texts(4)
    texts.read("", (1, 1, 1, 1))
    texts.read("", (2, 2, 2, 2))
    texts.end(0)
    texts.end(0)
    assert texts.read("", (3, 3)) == 0, "takes the place of the first text's second block"
    assert texts.read("", (1, 1, 1, 1)) == 1
    texts.end(1)
    assert texts.read("", (2, 2, 2, 2)) <= 1


def test_block_whose_like_is_known_is_exchanged_for_it() -> None:
    pool = BlockPool(2)
    one, two = pool.take(), pool.take()
    key = pool.prefix_hash("", None, (1, 2))
    assert pool.cache(key, one) == one
    assert pool.cache(key, two) == one
    assert pool.is_shared(one)
    assert pool.num_free == 1


def test_block_that_is_released_twice_is_our_bug() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.release([block])
    with pytest.raises(AssertionError):
        pool.release([block])


def test_block_that_is_forgotten_after_its_release_can_be_taken_and_not_found() -> None:
    pool = BlockPool(2)
    key = pool.prefix_hash("", None, (1, 2))
    block = pool.cache(key, pool.take())
    pool.release([block])
    pool.forget([block])
    assert not pool.is_evictable(block)
    assert pool.find(key) is None
    assert sorted(pool.take() for _ in range(2)) == [0, 1]
