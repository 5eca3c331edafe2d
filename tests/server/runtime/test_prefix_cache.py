"""What is kept of prompts, and what goes first."""

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from quill.server.runtime.prefix_cache import BLOCK, PrefixCache

BLOCK_BYTES = BLOCK * 8


def _keep(cache: PrefixCache, ids: list[int], scope: str = "") -> None:
    """Each position 'holds' its token."""

    def read(start: int, stop: int) -> npt.NDArray[Any]:
        return np.array(ids[start:stop], np.int64)[None, None, :, None]

    cache.keep(ids, read, scope)


def _load(cache: PrefixCache, ids: list[int]) -> list[int]:
    return [token for positions in cache.load(ids) for token in positions.ravel().tolist()]


def _prompt(number: int, num_blocks: int) -> list[int]:
    return [number * 1000 + i for i in range(num_blocks * BLOCK)]


def test_longest_kept_beginning_is_found() -> None:
    cache = PrefixCache(10**6)
    system = _prompt(1, 3)
    _keep(cache, [*system, *_prompt(2, 2)])
    assert cache.match([*system, *_prompt(3, 2)]) == 3 * BLOCK
    assert _load(cache, [*system, *_prompt(3, 2)]) == system
    assert cache.match(_prompt(2, 2)) == 0, "a block is known by what comes before it, too"


def test_only_whole_blocks_are_kept() -> None:
    cache = PrefixCache(10**6)
    _keep(cache, _prompt(1, 2)[:-1])
    assert cache.match(_prompt(1, 2)) == BLOCK


def test_common_beginnings_are_kept_once() -> None:
    cache = PrefixCache(10**6)
    for number in (2, 3, 4):
        _keep(cache, [*_prompt(1, 5), *_prompt(number, 1)])
    assert cache.num_bytes == 8 * BLOCK_BYTES


def test_prompt_may_be_kept_chunk_by_chunk() -> None:
    cache = PrefixCache(10**6)
    prompt = _prompt(1, 4)
    for stop in (5, 23, 40, 64):
        _keep(cache, prompt[:stop])
    assert _load(cache, prompt) == prompt


def test_least_recently_used_goes_first() -> None:
    cache = PrefixCache(4 * BLOCK_BYTES)
    _keep(cache, _prompt(1, 2))
    _keep(cache, _prompt(2, 2))
    cache.load(_prompt(1, 2))
    _keep(cache, _prompt(3, 1))
    assert cache.match(_prompt(1, 2)) == 2 * BLOCK
    assert cache.match(_prompt(2, 2)) == BLOCK, "the end of a prompt goes before its beginning"
    assert cache.match(_prompt(3, 1)) == BLOCK


def test_prompt_that_is_too_long_is_kept_as_far_as_it_fits() -> None:
    cache = PrefixCache(3 * BLOCK_BYTES + 5)
    _keep(cache, _prompt(1, 10))
    assert cache.match(_prompt(1, 10)) == 3 * BLOCK


def test_no_memory_turns_it_off() -> None:
    cache = PrefixCache(0)
    _keep(cache, _prompt(1, 2))
    assert cache.match(_prompt(1, 2)) == 0


PROMPTS = st.lists(st.integers(0, 2), max_size=6).map(
    lambda numbers: [token for number in numbers for token in _prompt(number, 1)]
)


@given(st.integers(0, 8), st.lists(PROMPTS, max_size=20))
def test_memory_is_bounded_and_what_is_loaded_is_right(size: int, prompts: list[list[int]]) -> None:
    cache = PrefixCache(size * BLOCK_BYTES)
    for prompt in prompts:
        loaded = _load(cache, prompt)
        assert loaded == prompt[: len(loaded)]
        assert len(loaded) == cache.match(prompt)
        _keep(cache, prompt)
        assert cache.num_bytes <= size * BLOCK_BYTES
        assert cache.match(prompt) == BLOCK * min(size, len(prompt) // BLOCK)


def test_scopes_share_nothing_and_go_by_age_together() -> None:
    cache = PrefixCache(3 * BLOCK_BYTES)
    prompt = _prompt(1, 1)
    _keep(cache, prompt, "alice")
    assert cache.match(prompt, "alice") == BLOCK
    assert cache.match(prompt, "bob") == cache.match(prompt) == 0
    assert cache.load(prompt, "bob") == []
    _keep(cache, prompt, "bob")
    assert cache.num_bytes == 2 * BLOCK_BYTES
    _keep(cache, _prompt(2, 2), "bob")
    assert cache.match(prompt, "alice") == 0, "the oldest goes, whosever it is"
    assert cache.match(_prompt(2, 2), "bob") == 2 * BLOCK
