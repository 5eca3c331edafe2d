"""Prefixes that come from a disk change no answer, whenever they come, and keep nobody waiting."""

import random
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.server.engine.block_pool import BlockTables, CachedBlock, LoadedBlock, PrefixHash
from quill.server.engine.engine import Engine
from quill.server.engine.sequence import make_sequence
from quill.server.outputs import DiskCacheStats
from quill.server.request import Limits, Request
from tests.server.engine.test_batch_invariance import ACTIONS, RandomBatch
from tests.server.engine_harness import CONTEXT, Harness, make_request
from tests.server.fake_session import FakeSession, oracle

Contents = dict[PrefixHash, npt.NDArray[Any]]


class MemoryDisk:
    """What is on it outlives an engine. It is as slow as a test wants, and loses what it wants."""

    def __init__(
        self,
        contents: Contents,
        session: FakeSession,
        rng: random.Random | None = None,
        max_loading: int = 100,
    ) -> None:
        self.contents = contents
        self.max_loading = max_loading
        self.answers = True
        self.num_loaded = self.num_waits = 0
        self._session = session
        self._rng = rng
        self._to_write: list[CachedBlock] = []
        self._to_read: list[tuple[PrefixHash, int]] = []

    def __contains__(self, key: PrefixHash) -> bool:
        return key in self.contents

    def keep(self, cached: CachedBlock, place: int) -> None:
        self._to_write.append(cached)

    def load(self, key: PrefixHash, block: int, place: int) -> None:
        self._to_read.append((key, block))
        assert len(self._to_read) <= self.max_loading

    def loaded(self) -> list[LoadedBlock]:
        """All, or by chance a few of the first; some are damaged."""
        self._write()
        rng, waiting = self._rng, self._to_read
        num = len(waiting) if rng is None else rng.randint(0, len(waiting))
        now, self._to_read = waiting[: num * self.answers], waiting[num * self.answers :]
        found = []
        for key, block in now:
            is_good = key in self.contents and (rng is None or rng.random() < 0.9)
            if is_good:
                self._session._ids_NP[block] = self.contents[key]
            else:
                self.contents.pop(key, None)
            found.append(LoadedBlock(key, block, is_good))
        self.num_loaded += len(found)
        return found

    def _write(self) -> None:
        """As late as may be: what was evicted meanwhile holds another text."""
        for cached in self._to_write:
            if cached.is_valid:
                self.contents[cached.key] = self._session._ids_NP[cached.block].copy()
        self._to_write = []

    def wait(self) -> None:
        self.num_waits += 1

    def forget(self, keys: Sequence[PrefixHash]) -> None:
        for key in keys:
            self.contents.pop(key, None)

    def take_stats(self) -> DiskCacheStats:
        return DiskCacheStats(self.num_loaded, 0, 0, 0, 0, 0, 0)

    def close(self) -> None:
        self._write()


def with_disk(harness: Harness, contents: Contents, **options: Any) -> MemoryDisk:
    """As if the server was started again."""
    disk = MemoryDisk(contents, harness.session, **options)
    harness.engine = Engine(harness.session, harness.limits, harness._clock, disk)
    return disk


def answer_with(contents: Contents, *requests: Request, **limits: Any) -> Harness:
    """By a new engine, one request after another."""
    harness = Harness(**limits)
    disk = with_disk(harness, contents)
    for request in requests:
        harness.submit(request)
        harness.run()
        assert harness.answer(request) == oracle(request, CONTEXT)
    disk.close()
    return harness


def test_the_next_engine_goes_on_where_the_prefix_on_the_disk_ends() -> None:
    contents: Contents = {}
    request = make_request("a", num_prompt=70)
    assert answer_with(contents, request).started == {"a": 0}
    again = answer_with(contents, request)
    assert again.started == {"a": 64}
    assert again.session.steps[0] == [(64, 70)]
    assert again.engine._scheduler.take_disk_stats() == DiskCacheStats(4, 0, 0, 0, 0, 0, 0)
    contents.popitem()  # the last: of the answer's first tokens, too
    assert answer_with(contents, make_request("a", num_prompt=50)).started == {"a": 48}


def test_second_turn_finds_the_answer_on_the_disk_too() -> None:
    contents: Contents = {}
    first = make_request("a", num_prompt=20, max_new_tokens=30)
    history = (*first.prompt_ids, *answer_with(contents, first).tokens["a", 0])
    second = Request(request_id="b", prompt_ids=(*history, 7, 7, 7), max_new_tokens=3)
    assert answer_with(contents, second).started == {"b": 48}


def test_no_scope_finds_another_s_blocks() -> None:
    contents: Contents = {}
    answer_with(contents, make_request("a", num_prompt=70, cache_scope="one"))
    for scope, num_cached in (("two", 0), ("", 0), ("one", 64)):
        harness = answer_with(dict(contents), make_request("a", 70, cache_scope=scope))
        assert harness.started == {"a": num_cached}, scope


def test_what_is_in_memory_is_not_read_from_the_disk() -> None:
    contents: Contents = {}
    first, again = make_request("a", num_prompt=70), make_request("a" * 51, num_prompt=70)
    answer_with(contents, first)
    harness = Harness()
    disk = with_disk(harness, contents)
    for request in (first, again):
        harness.submit(request)
        harness.run()
    assert harness.started["a" * 51] == 64
    assert disk.num_loaded == 4


def test_requests_that_come_together_load_their_shared_prefix_once() -> None:
    contents: Contents = {}
    requests = [make_request("a" * (1 + 50 * i), num_prompt=70) for i in range(4)]
    answer_with(contents, requests[0])
    harness = Harness()
    disk = with_disk(harness, contents)
    for request in requests:
        harness.submit(request)
    harness.run()
    assert disk.num_loaded == 4
    assert set(harness.started.values()) == {64}


def test_running_sequences_go_on_while_a_prefix_comes() -> None:
    contents: Contents = {}
    slow = make_request("aa", num_prompt=70)
    answer_with(contents, slow)
    harness = Harness(speculative=False)
    disk = with_disk(harness, contents)
    harness.submit(make_request("b", max_new_tokens=30))
    harness.step()
    disk.answers = False
    harness.submit(slow)
    for _ in range(5):
        harness.step()
    assert len(harness.tokens["b", 0]) == 6
    assert "aa" not in harness.started
    assert not disk.num_waits, "there is something to do"
    disk.answers = True
    harness.run()
    assert harness.started["aa"] == 64
    assert harness.answer(slow) == oracle(slow, CONTEXT)


def test_engine_waits_where_a_prefix_comes_and_nothing_else_is_to_do() -> None:
    contents: Contents = {}
    request = make_request("a", num_prompt=70)
    answer_with(contents, request)
    harness = Harness()
    disk = with_disk(harness, contents)
    disk.answers = False
    harness.submit(request)
    for _ in range(3):
        harness.step()
    assert disk.num_waits == 3
    assert not harness.session.steps
    harness.engine.end("a", None, "cancelled")
    disk.answers = True
    harness.step()
    assert harness.engine._scheduler.num_blocks_used == 0, "what has come is cached"


def test_disk_that_stops_answering_leaves_prompts_to_the_model() -> None:
    contents: Contents = {}
    request = make_request("a", num_prompt=70)
    answer_with(contents, request)
    harness = Harness()
    disk = with_disk(harness, contents)
    disk.answers = False
    harness.submit(request)
    harness.step()
    disk.contents = {}  # as a stalled disk says
    harness.run()
    assert harness.started == {"a": 0}
    assert harness.answer(request) == oracle(request, CONTEXT)
    assert harness.engine._scheduler.num_blocks_used == 4, "the disk may still write there"
    disk.answers = True
    harness.step()
    assert harness.engine._scheduler.num_blocks_used == 0


def test_prefix_that_finds_no_free_block_does_not_come() -> None:
    request = make_request("a", num_prompt=70)
    contents: Contents = {}
    answer_with(contents, request)
    session = FakeSession(2)
    limits = Limits(max_num_seqs=1, context=CONTEXT, num_blocks=2)
    blocks = BlockTables(limits, MemoryDisk(contents, session))
    sequence = make_sequence(request, 0, CONTEXT)
    taken = blocks.pool.take(), blocks.pool.take()
    assert not blocks.load_prefix(sequence, 69)
    blocks.pool.release(taken[1:])
    assert blocks.load_prefix(sequence, 69)
    blocks.finish_loads()
    assert blocks.adopt_prefix(sequence, 69)
    assert sequence.blocks == [taken[1]]


def test_content_that_is_not_to_be_trusted_leaves_the_disk() -> None:
    contents: Contents = {}
    harness = Harness()
    disk = with_disk(harness, contents)
    harness.submit(make_request("a", num_prompt=90, prompt_logprobs=0))
    harness.step()
    disk._write()
    assert contents
    harness.session.poisoned = {0}
    harness.run()
    assert "a" in harness.failed
    disk.close()
    assert not contents


@settings(max_examples=150, deadline=None)
@given(
    st.integers(3, 6),
    st.integers(7, 18),
    st.integers(1, 8),
    st.integers(0, 2**32),
    st.lists(st.tuples(st.sampled_from([True] + [False] * 9), ACTIONS), max_size=40),
)
def test_any_batch_gets_the_answers_of_requests_alone_over_a_disk_and_restarts(
    max_num_seqs: int,
    num_blocks: int,
    max_loading: int,
    seed: int,
    actions: list[tuple[bool, tuple[str, Any]]],
) -> None:
    contents, rng = Contents(), random.Random(seed)

    def start() -> tuple[RandomBatch, MemoryDisk]:
        batch = RandomBatch(max_num_seqs, num_blocks, 0.001)
        return batch, with_disk(batch, contents, rng=rng, max_loading=max_loading)

    def end(batch: RandomBatch, disk: MemoryDisk) -> None:
        batch.run()
        while disk._to_read:
            batch.step()
        batch.check()
        disk.close()

    batch, disk = start()
    for restarts, (kind, value) in actions:
        if restarts:
            end(batch, disk)
            batch, disk = start()
        batch.act(kind, value, False)
    end(batch, disk)


@pytest.mark.parametrize("num_blocks", [7, 12])
def test_prefixes_of_more_requests_than_there_are_blocks_come_one_after_another(
    num_blocks: int,
) -> None:
    contents: Contents = {}
    requests = [make_request("a" * (i + 1), num_prompt=70) for i in range(6)]
    answer_with(contents, *requests)
    harness = Harness(max_num_seqs=6, num_blocks=num_blocks)
    with_disk(harness, contents, rng=random.Random(1))
    for request in requests:
        harness.submit(request)
    harness.run()
    for request in requests:
        assert harness.answer(request) == oracle(request, CONTEXT)
    assert sum(harness.started.values()) > 100
