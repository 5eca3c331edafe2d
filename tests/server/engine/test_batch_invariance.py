"""Any batch over few blocks gets the answers that each request gets alone, and gives all blocks
back."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.server.request import BeamParams, Constraint, Request, SamplingParams
from tests.server.engine_harness import (
    CONTEXT,
    Harness,
    as_translation,
    make_request,
    reference_search,
)
from tests.server.fake_session import oracle
from tests.server.small_grammars import EOS, GRAMMARS, text_of

SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "num_prompt": st.integers(1, 30) | st.integers(1, 70),
    "max_new_tokens": st.integers(1, 20) | st.integers(40, 90),
    "priority": st.integers(-1, 1),
    "seed": st.integers(0, 2**64 - 1),
    "eos_ids": st.sampled_from([frozenset[int](), frozenset({1, 2, 13, 14})]),
    "min_new_tokens": st.sampled_from([0, 0, 1, 5, 60]),
    "owner": st.sampled_from(["", "a", "b"]),
    "cache_scope": st.sampled_from(["", "a"]),
    "logprobs": st.sampled_from([None, None, 1]),
}
SAMPLED = st.fixed_dictionaries(
    {
        **FIELDS,
        "num_sequences": st.integers(1, 3),
        "sampling": SAMPLINGS,
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
    }
)
CONSTRAINED = st.fixed_dictionaries(
    {
        **FIELDS,
        "num_sequences": st.integers(1, 3),
        "sampling": SAMPLINGS,
        "constraint": st.sampled_from(sorted(GRAMMARS)).map(
            lambda name: Constraint(*GRAMMARS[name])
        ),
        "eos_ids": st.just(frozenset({EOS})),
        "stop_ids": st.sampled_from([frozenset[int](), frozenset({13, 14})]),
    }
)
SEARCHES = st.fixed_dictionaries(
    {
        **FIELDS,
        "beams": st.builds(
            BeamParams,
            num_beams=st.integers(2, 3),
            length_penalty=st.sampled_from([1.0, 0.0, 2.5, -1.0]),
            early_stopping=st.sampled_from(["heuristic", "at_once", "never"]),
        ),
        "num_sequences": st.integers(1, 2),
        "stop_ids": st.sampled_from([frozenset[int](), frozenset({3, 20})]),
    }
)
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), SAMPLED | SEARCHES),
    st.tuples(st.just("submit"), SAMPLED),
    st.tuples(st.just("submit"), CONSTRAINED),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("end"), st.integers(0, 12)),
    st.tuples(st.just("end one"), st.integers(0, 12)),
    st.tuples(st.just("late"), SAMPLED),
)


class RandomBatch(Harness):
    """Submits, steps and ends requests by chance."""

    def __init__(self, max_num_seqs: int, num_blocks: int, step_s: float, **limits: Any) -> None:
        super().__init__(max_num_seqs, num_blocks, step_s, **limits)
        self.requests: list[Request] = []
        self.ended: set[str] = set()

    def act(self, kind: str, value: Any, translates: bool) -> None:
        if kind == "submit" or kind == "late":
            self._ask(value, translates, kind == "late")
        elif kind == "step":
            for _ in range(value):
                self.step()
        elif value < len(self.requests):
            request_id = self.requests[value].request_id
            self.ended.add(request_id)
            self.engine.end(request_id, 0 if kind == "end one" else None, "cancelled")

    def _ask(self, fields: dict[str, Any], translates: bool, is_late: bool) -> None:
        # Names of 10 lengths, so that prompts begin alike and blocks are shared.
        name = f"{len(self.requests):03}" + "x" * (len(self.requests) % 10)
        least = min(fields.get("min_new_tokens", 0), fields["max_new_tokens"])
        request = make_request(name, **{**fields, "min_new_tokens": least})
        if translates and request.prompt_logprobs is None:
            request = as_translation(request)
        if is_late:
            request = Request(**{**vars(request), "deadline_s": self.now_s + 0.3})
            self.ended.add(name)
        if self.limits.fits(request):
            self.requests.append(request)
            self.submit(request)

    def check(self) -> None:
        for request in self.requests:
            name = request.request_id
            for i in range(request.num_sequences):
                assert name in self.failed or (name, i) in self.finished, "every request ends"
            if name not in self.ended:
                self._check_answer(request)
        scheduler = self.engine._scheduler
        assert scheduler.num_seqs == scheduler.num_waiting == scheduler.num_blocks_used == 0
        assert scheduler.is_empty

    def _check_answer(self, request: Request) -> None:
        name = request.request_id
        if request.beams is None:
            assert self.answer(request) == oracle(request, CONTEXT)
        else:
            self.check_search(request, reference_search(request))
        if request.prompt_logprobs is not None:
            assert [each.token_id for each in self.prompts[name]] == list(request.prompt_ids)
        usage = self.finished[name, 0].usage
        assert 0 <= usage.accepted <= min(usage.draft, usage.generated)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(3, 6),
    st.integers(7, 18),
    st.sampled_from([0.0, 0.001, 0.02]),
    st.fixed_dictionaries(
        {
            "speculative": st.booleans(),
            "prefix_caching": st.sampled_from([True, True, False]),
            "block_size": st.sampled_from([16, 16, 4]),
        }
    ),
    st.booleans(),
    st.lists(ACTIONS, max_size=40),
)
def test_any_batch_gets_the_answers_of_requests_alone(
    max_num_seqs: int,
    num_blocks: int,
    step_s: float,
    limits: dict[str, Any],
    translates: bool,
    actions: list[tuple[str, Any]],
) -> None:
    num_blocks *= 16 // limits["block_size"]
    batch = RandomBatch(max_num_seqs, num_blocks, step_s, **limits)
    for kind, value in actions:
        batch.act(kind, value, translates)
    batch.run()
    batch.check()


@pytest.mark.parametrize("num_blocks", [12, 40])
def test_preempted_requests_go_on_with_the_same_tokens(num_blocks: int) -> None:
    batch = RandomBatch(8, num_blocks, 0.001)
    for number in range(8):
        beams = BeamParams(num_beams=2) if number == 3 else None
        fields = {"num_prompt": 16, "max_new_tokens": 70, "beams": beams, "seed": number}
        batch.act("submit", {**fields, "sampling": SamplingParams(temperature=0.5)}, False)
    batch.run()
    batch.check()
    assert (batch.engine._scheduler.num_preempted > 0) == (num_blocks == 12)


@pytest.mark.parametrize("speculative", [True, False])
def test_answers_that_have_a_grammar_survive_preemptions(speculative: bool) -> None:
    batch = RandomBatch(8, 14, 0.001, speculative=speculative)
    for number in range(16):
        fields = {"num_prompt": 16, "max_new_tokens": 70, "seed": number, "num_sequences": 2}
        form = {"constraint": Constraint(*GRAMMARS["schema"]), "eos_ids": frozenset({EOS})}
        batch.act("submit", {**fields, **form, "sampling": SamplingParams(temperature=1.2)}, False)
    batch.run()
    batch.check()
    assert batch.engine._scheduler.num_preempted > 0
    finished = {key: event for key, event in batch.finished.items() if event.reason == "eos"}
    assert len(finished) > 16
    for key, event in finished.items():
        json.loads(text_of(batch.tokens[key]))
        assert (event.usage.accepted > 0) == speculative, "keys are forced"
