"""Who runs in a step; with slots that are lists of tokens instead of caches."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.server.request import Request
from quill.server.scheduler.limits import Limits
from quill.server.scheduler.plan import Copy, DecodePlan, Outcome, PrefillPlan
from quill.server.scheduler.scheduler import Scheduler


class Remembered:
    """A prefix index that knows one prompt."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._ids = tuple(ids)

    def match(self, ids: Sequence[int], scope: str = "") -> int:
        num = 0
        while num < min(len(ids), len(self._ids)) and ids[num] == self._ids[num]:
            num += 1
        return num


class World:
    """Runs plans on slots that hold tokens, and checks every rule of the plans on the way."""

    def __init__(self, max_rows: int, prefixes: Remembered | None = None) -> None:
        limits = Limits(max_rows=max_rows, context=64)
        self.scheduler = Scheduler(limits, prefixes or Remembered())
        self.slots: list[list[int]] = [[] for _ in range(max_rows)]
        self.finished: dict[tuple[str, int], str] = {}
        self.answers: dict[tuple[str, int], list[int]] = {}
        self.kinds: list[str] = []
        self.chunks: dict[str, list[int]] = {}

    def step(self, max_chunk: int = 8) -> bool:
        plan = self.scheduler.plan(max_chunk)
        if isinstance(plan, PrefillPlan):
            self._prefill(plan, max_chunk)
        elif isinstance(plan, DecodePlan):
            self._decode(plan)
        return plan is not None

    def run(self, max_chunk: int = 8) -> None:
        while self.step(max_chunk):
            assert len(self.kinds) < 100_000

    def remove(self, request_id: str, sequence: int | None = None) -> None:
        self._copy(self.scheduler.remove(request_id, sequence))

    def _prefill(self, plan: PrefillPlan, max_chunk: int) -> None:
        assert not (self.kinds[-1:] == ["prefill"] and self.scheduler.num_rows), "decode first"
        self.kinds.append("prefill")
        prompt = plan.request.prompt_ids
        assert plan.slot >= self.scheduler.num_rows
        if plan.is_first:
            self.slots[plan.slot] = list(prompt[: plan.cached])
            self.chunks[plan.request.request_id] = []
        assert len(self.slots[plan.slot]) == plan.start
        self.slots[plan.slot] += prompt[plan.start : plan.stop]
        self.chunks[plan.request.request_id].append(plan.stop - plan.start)
        assert plan.stop - plan.start >= min(2, len(prompt))
        assert plan.stop - plan.start <= max(max_chunk, 3)
        tokens = []
        if plan.is_last and plan.request.max_new_tokens:
            tokens = [self._next(plan.slot, row.sequence) for row in plan.rows]
        self._commit(self.scheduler.commit(plan, tokens))

    def _decode(self, plan: DecodePlan) -> None:
        self.kinds.append("decode")
        tokens = []
        for slot, row in enumerate(plan.rows):
            text = [*row.request.prompt_ids, *row.token_ids]
            assert self.slots[slot] == text[:-1], "a slot holds what its row has read"
            self.slots[slot] = text
            tokens.append(self._next(slot, row.sequence))
        self._commit(self.scheduler.commit(plan, tokens))

    def _next(self, slot: int, sequence: int) -> int:
        """A 'model': a token that depends on all that the slot holds."""
        return (sum(self.slots[slot]) * 31 + len(self.slots[slot]) + sequence) % 100

    def _commit(self, outcome: Outcome) -> None:
        for row, reason in outcome.finished:
            key = (row.request.request_id, row.sequence)
            assert key not in self.finished, "ended twice"
            self.finished[key] = reason
            self.answers[key] = row.token_ids
        self._copy(outcome.copies)

    def _copy(self, copies: list[Copy]) -> None:
        for copy in copies:
            self.slots[copy.target] = self.slots[copy.source][: copy.stop]


def _request(name: str = "r", num_prompt: int = 5, **fields: Any) -> Request:
    prompt = tuple((len(name) * 7 + i * 3) % 90 for i in range(num_prompt))
    fields.setdefault("max_new_tokens", 4)
    return Request(request_id=name, **{"prompt_ids": prompt, **fields})


def _answer_alone(request: Request) -> list[list[int]]:
    world = World(max_rows=8)
    world.scheduler.add(request)
    world.run(max_chunk=64)
    name = request.request_id
    return [world.answers[name, sequence] for sequence in range(request.num_sequences)]


def test_one_request_is_read_and_then_decoded_to_its_length() -> None:
    world = World(max_rows=2)
    world.scheduler.add(_request(num_prompt=20))
    world.run(max_chunk=8)
    assert world.chunks["r"] == [8, 8, 4]
    assert world.kinds == ["prefill"] * 3 + ["decode"] * 3
    assert world.finished == {("r", 0): "length"}


def test_running_rows_decode_between_the_chunks_of_a_long_prompt() -> None:
    world = World(max_rows=2)
    world.scheduler.add(_request("running", max_new_tokens=40))
    world.step()
    world.scheduler.add(_request("long", num_prompt=40))
    for _ in range(10):
        world.step()
    assert world.kinds[1:] == ["decode", "prefill"] * 5


def test_prompt_of_one_token_is_read_at_once() -> None:
    world = World(max_rows=1)
    world.scheduler.add(_request(num_prompt=1))
    world.run()
    assert world.chunks["r"] == [1]


def test_several_answers_share_one_reading_of_the_prompt() -> None:
    world = World(max_rows=4)
    request = _request(num_prompt=6, num_sequences=3, max_new_tokens=5)
    world.scheduler.add(request)
    world.run()
    assert world.kinds == ["prefill", *["decode"] * 4]
    answers = [world.answers["r", sequence] for sequence in range(3)]
    assert answers[0] == _answer_alone(_request(num_prompt=6, max_new_tokens=5))[0]
    assert len({tuple(answer) for answer in answers}) == 3


def test_request_that_needs_many_slots_is_not_overtaken() -> None:
    world = World(max_rows=2)
    world.scheduler.add(_request("one", max_new_tokens=10))
    world.step()
    world.scheduler.add(_request("two", num_sequences=2))
    world.scheduler.add(_request("late"))
    world.run()
    assert list(world.finished) == [("one", 0), ("two", 0), ("two", 1), ("late", 0)]


@pytest.mark.parametrize(("known", "cached"), [(0, 0), (7, 7), (18, 18), (19, 18), (20, 18)])
def test_cached_prefix_leaves_two_tokens_to_read(known: int, cached: int) -> None:
    request = _request(num_prompt=20)
    world = World(1, Remembered(request.prompt_ids[:known]))
    world.scheduler.add(request)
    plan = world.scheduler.plan(64)
    assert isinstance(plan, PrefillPlan)
    assert (plan.cached, plan.start, plan.stop) == (cached, cached, 20)
    assert plan.is_first
    assert plan.is_last


def test_prompt_whose_logprobs_are_wanted_is_read_in_full() -> None:
    request = _request(num_prompt=63, prompt_logprobs=0, max_new_tokens=0)
    world = World(1, Remembered(request.prompt_ids))
    world.scheduler.add(request)
    plan = world.scheduler.plan(1000)
    assert isinstance(plan, PrefillPlan)
    assert (plan.cached, plan.stop) == (0, 63)
    world._prefill(plan, 1000)
    assert world.finished == {("r", 0): "length"}
    assert world.answers == {("r", 0): []}


def test_answer_ends_where_the_context_does() -> None:
    world = World(1)
    world.scheduler.add(_request(num_prompt=60, max_new_tokens=60))
    world.run()
    assert len(world.answers["r", 0]) == 4
    assert world.finished == {("r", 0): "length"}


@pytest.mark.parametrize(("field", "reason"), [("eos_ids", "eos"), ("stop_ids", "stop")])
def test_token_that_ends_an_answer_is_its_last(field: str, reason: str) -> None:
    request = _request(max_new_tokens=20)
    whole = _answer_alone(request)[0]
    stop = whole[3]
    world = World(1)
    ends: dict[str, Any] = {field: frozenset({stop})}
    world.scheduler.add(_request(max_new_tokens=20, **ends))
    world.run()
    assert world.answers["r", 0] == whole[: whole.index(stop) + 1]
    assert world.finished == {("r", 0): reason}


def test_request_removed_while_its_prompt_is_read_frees_its_slot() -> None:
    world = World(1)
    world.scheduler.add(_request("gone", num_prompt=40))
    world.step()
    world.scheduler.add(_request("next"))
    world.remove("gone")
    world.run()
    assert world.finished == {("next", 0): "length"}


def test_one_answer_removed_leaves_the_others() -> None:
    world = World(3)
    request = _request(num_sequences=3, max_new_tokens=6)
    world.scheduler.add(request)
    world.step()
    world.remove("r", 1)
    world.run()
    alone = _answer_alone(request)
    assert world.answers == {("r", 0): alone[0], ("r", 2): alone[2]}


REQUESTS: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    num_prompt=st.integers(1, 50),
    max_new_tokens=st.integers(1, 12),
    num_sequences=st.integers(1, 3),
    priority=st.integers(-2, 2),
    eos_ids=st.sampled_from([frozenset[int](), frozenset(range(0, 100, 9))]),
)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), REQUESTS),
    st.tuples(st.just("step"), st.integers(0, 20)),
    st.tuples(st.just("remove"), st.integers(0, 30)),
)


@settings(max_examples=100, deadline=None)
@given(st.integers(3, 5), st.lists(ACTIONS, max_size=60))
def test_any_crowd_gets_the_answers_of_requests_alone(
    max_rows: int, actions: list[tuple[str, Any]]
) -> None:
    world = World(max_rows)
    requests: list[Request] = []
    removed: set[str] = set()
    for kind, value in actions:
        if kind == "add":
            requests.append(_request("r" * (len(requests) + 1), **value))
            world.scheduler.add(requests[-1])
        elif kind == "step":
            world.step(value)
        elif value < len(requests):
            removed.add(requests[value].request_id)
            world.remove(requests[value].request_id)
    world.run()
    for request in requests:
        if request.request_id not in removed:
            alone = _answer_alone(request)
            crowd = [world.answers[request.request_id, i] for i in range(request.num_sequences)]
            assert crowd == alone
    assert world.scheduler.num_rows == world.scheduler.num_waiting == 0
