"""BeamParams are rows beside other people's, and the answers are those of
model/reference/beam_search.py."""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.model.reference.beam_search import BeamParameters, beam_search, search
from quill.server.engine.engine import Engine
from quill.server.errors import CancelledError, DeadlineError, InvalidFieldError, RequestError
from quill.server.limits import Limits
from quill.server.outputs import FailEvent, FinishEvent, HypothesisEvent, TokenEvent
from quill.server.request import BeamParams, Request, SamplingParams
from tests.operators import SERVED
from tests.server.fake_session import VOCAB_SIZE, FakeSession, logits_after, oracle
from tests.server.tiny_bundle import CONTEXT, TinyBundle

NUM_BLOCKS = 64
Found = list[tuple[HypothesisEvent, FinishEvent]]


class Results:
    """What came of some requests: searches' hypotheses, others' tokens, errors."""

    def __init__(self) -> None:
        self.found: dict[str, Found] = defaultdict(list)
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.failed: dict[str, RequestError] = {}
        self._told: dict[tuple[str, int], HypothesisEvent] = {}

    def step(self, engine: Engine) -> None:
        for event in engine.step().events:
            if isinstance(event, TokenEvent):
                self.tokens[event.request_id, event.sequence].append(event.token_id)
            elif isinstance(event, HypothesisEvent):
                self._told[event.request_id, event.sequence] = event
            elif isinstance(event, FailEvent):
                self.failed[event.request_id] = event.error
            elif isinstance(event, FinishEvent) and event.score is not None:
                told = self._told[event.request_id, event.sequence]
                self.found[event.request_id].append((told, event))

    def run(self, engine: Engine) -> None:
        for _ in range(10_000):
            if engine.is_idle:
                return
            self.step(engine)
        raise AssertionError("the engine never comes to rest")


def parameters_of(request: Request) -> BeamParameters:
    assert request.beams is not None
    names: dict[str, Any] = {"heuristic": False, "at_once": True, "never": "never"}
    return BeamParameters(
        num_beams=request.beams.num_beams,
        length_penalty=request.beams.length_penalty,
        early_stopping=names[request.beams.early_stopping],
        num_return_sequences=request.num_sequences,
        max_new_tokens=request.max_new_tokens,
        stop_ids=request.all_stop_ids,
        min_new_tokens=request.min_new_tokens,
    )


def check_found(found: Found, expected: Sequence[Any]) -> None:
    assert [told.token_ids for told, _ in found] == [each.token_ids for each in expected]
    scores = [finish.score for _, finish in found]
    assert scores == pytest.approx([each.score for each in expected], abs=1e-4)
    for told, finish in found:
        assert finish.usage.generated == len(told.token_ids)
        if told.logprobs:
            assert [each.token_id for each in told.logprobs] == list(told.token_ids)


def fake_search(request: Request) -> Sequence[Any]:
    def next_logits(rows: Sequence[Sequence[int]], parents: Sequence[int]) -> Any:
        return np.stack([logits_after([*(request.source_ids or ()), *row]) for row in rows])

    max_length = min(request.max_new_tokens, CONTEXT - len(request.prompt_ids))
    return search(next_logits, request.prompt_ids, parameters_of(request), max_length)


BEAMS = st.builds(
    BeamParams,
    num_beams=st.integers(2, 4),
    length_penalty=st.sampled_from([1.0, 0.0, 2.5, -1.0]),
    early_stopping=st.sampled_from(["heuristic", "at_once", "never"]),
)


@st.composite
def requests(draw: st.DrawFn, name: str, translates: bool) -> Request:
    ids = tuple(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40)))
    beams = draw(st.none() | BEAMS)
    most = 3 if beams is None else beams.num_beams
    max_new_tokens = draw(st.integers(1, 12))
    return Request(
        request_id=name,
        prompt_ids=(0,) if translates else ids,
        source_ids=ids if translates else None,
        beams=beams,
        sampling=SamplingParams(temperature=draw(st.sampled_from([0.0, 1.0])))
        if not beams
        else SamplingParams(),
        num_sequences=draw(st.integers(1, most)),
        max_new_tokens=max_new_tokens,
        min_new_tokens=draw(st.integers(0, max_new_tokens)),
        eos_ids=frozenset(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8))),
        stop_ids=frozenset(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2))),
        logprobs=draw(st.sampled_from([None, 2])),
    )


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(4, 7), st.integers(24, 40), st.booleans())
def test_any_batch_with_beams_gets_the_oracles_answers(
    data: st.DataObject, max_num_seqs: int, num_blocks: int, translates: bool
) -> None:
    engine = Engine(
        FakeSession(num_blocks),
        Limits(max_num_seqs=max_num_seqs, context=CONTEXT, num_blocks=num_blocks),
    )
    results, asked, ended = Results(), list[Request](), set[str]()
    for number in range(data.draw(st.integers(1, 6))):
        asked.append(data.draw(requests(str(number), translates)))
        engine.submit(asked[-1], 0.0)
        for _ in range(data.draw(st.integers(0, 6))):
            results.step(engine)
        if data.draw(st.integers(0, 9)) == 0:
            gone = data.draw(st.sampled_from(asked)).request_id
            ended.add(gone)
            engine.end(gone, None, "cancelled")
    results.run(engine)
    for request in asked:
        name = request.request_id
        if name in ended and name not in results.found:
            continue
        if request.beams is None:
            answers = [results.tokens[name, i] for i in range(request.num_sequences)]
            assert name in ended or answers == oracle(request, CONTEXT)
        else:
            check_found(results.found[name], fake_search(request))


@pytest.mark.parametrize("precision", SERVED)
@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_beams_in_batch_are_those_of_the_reference_and_of_the_request_alone(
    tiny_bundle: TinyBundle, tiny_translator: TinyBundle, family: str, precision: str
) -> None:
    bundle = tiny_bundle if family == "causal" else tiny_translator
    rng = random.Random(3)
    asked = [_random_request(str(number), family, rng) for number in range(16)]
    engine, plain = (
        Engine(
            bundle.session(precision, num_blocks),
            Limits(max_num_seqs=num_rows, context=CONTEXT, num_blocks=num_blocks),
        )
        for num_rows, num_blocks in ((10, 40), (4, 40))
    )
    crowd = Results()
    for request in asked:
        engine.submit(request, 0.0)
        for _ in range(rng.randint(0, 5)):
            crowd.step(engine)
    crowd.run(engine)
    for request in asked:
        alone = Results()
        plain.submit(request, 0.0)
        alone.run(plain)
        name = request.request_id
        assert crowd.tokens[name, 0] == alone.tokens[name, 0]
        assert [told for told, _ in crowd.found[name]] == [told for told, _ in alone.found[name]]
        scores = [[finish.score for _, finish in each.found[name]] for each in (crowd, alone)]
        assert scores[0] == scores[1], "to the last bit"
        if request.beams is not None and precision == "fp32":
            expected = beam_search(
                bundle.model,
                request.prompt_ids,
                parameters_of(request),
                source_ids=request.source_ids,
                cached=True,
            )
            check_found(crowd.found[name], expected)


def _random_request(name: str, family: str, rng: random.Random) -> Request:
    ids = tuple(rng.randrange(512) for _ in range(rng.randint(1, 40)))
    beams = None
    if rng.random() < 0.7:
        beams = BeamParams(
            num_beams=rng.randint(2, 4),
            length_penalty=rng.choice([0.6, 1.0, 2.0]),
            early_stopping=rng.choice(["heuristic", "at_once", "never"]),
        )
    return Request(
        request_id=name,
        prompt_ids=ids if family == "causal" else (0,),
        source_ids=None if family == "causal" else ids,
        beams=beams,
        num_sequences=1 if beams is None else rng.randint(1, beams.num_beams),
        max_new_tokens=rng.randint(4, 20),
        eos_ids=frozenset(rng.sample(range(512), 12)),
        seed=rng.getrandbits(64),
        logprobs=rng.choice([None, 2]),
    )


def _searching(**changes: Any) -> Request:
    request = Request(
        request_id="r", prompt_ids=(1, 2, 3), beams=BeamParams(num_beams=3), max_new_tokens=20
    )
    return dataclasses.replace(request, **changes)


def _engine(max_num_seqs: int = 4, session: FakeSession | None = None) -> Engine:
    limits = Limits(max_num_seqs=max_num_seqs, context=CONTEXT, num_blocks=NUM_BLOCKS)
    return Engine(session or FakeSession(NUM_BLOCKS), limits, clock=lambda: 5.0)


def test_search_that_is_ended_has_no_answer_and_frees_its_sequences() -> None:
    engine, results = _engine(), Results()
    engine.submit(_searching(request_id="gone"), 0.0)
    engine.submit(_searching(request_id="late", deadline_s=5.0), 0.0)
    engine.submit(_searching(request_id="after"), 0.0)
    for _ in range(4):
        results.step(engine)
    engine.end("gone", None, "cancelled")
    results.run(engine)
    assert isinstance(results.failed["gone"], CancelledError)
    assert isinstance(results.failed["late"], DeadlineError)
    assert "before the search was over" in str(results.failed["late"])
    check_found(results.found["after"], fake_search(_searching()))


def test_logits_that_are_not_finite_fail_the_search_and_nobody_else() -> None:
    session = FakeSession(NUM_BLOCKS)
    engine, results = _engine(5, session), Results()
    other = Request(request_id="other", prompt_ids=(4, 5), max_new_tokens=9)
    engine.submit(_searching(), 0.0)
    engine.submit(other, 0.0)
    for _ in range(4):
        results.step(engine)
    session.poisoned = {1}
    results.step(engine)
    session.poisoned = set()
    results.run(engine)
    assert set(results.failed) == {"r"}
    assert [results.tokens["other", 0]] == oracle(other, CONTEXT)


def test_beams_share_all_but_the_block_that_they_write_into() -> None:
    session = FakeSession(NUM_BLOCKS)
    engine, results = _engine(4, session), Results()
    prompt = tuple(range(40))
    engine.submit(_searching(prompt_ids=prompt, max_new_tokens=40), 0.0)
    most = 0
    while not engine.is_idle:
        results.step(engine)
        most = max(most, engine._scheduler.num_blocks_used)
    check_found(results.found["r"], fake_search(_searching(prompt_ids=prompt, max_new_tokens=40)))
    assert most <= 2 + 3 * 3, "two full blocks of the prompt, and each beam's own"


@pytest.mark.parametrize("penalty", [10.5, float("nan")])
def test_length_penalty_out_of_range_is_refused_by_name(penalty: float) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        BeamParams(num_beams=2, length_penalty=penalty)
    assert caught.value.field == "length_penalty"


def test_more_answers_than_beams_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match="at most num_beams, which is 3"):
        _searching(num_sequences=4)
