"""An engine without a model or a thread: whoever tests it turns the clock and notes what came."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quill.server.engine.engine import Engine
from quill.server.engine.model_runner import Session
from quill.server.errors import RequestError
from quill.server.outputs import (
    EmbeddingEvent,
    EngineOutputs,
    FailEvent,
    FinishEvent,
    HypothesisEvent,
    PositionLogprobs,
    PromptEvent,
    StartEvent,
    TokenEvent,
)
from quill.server.request import Limits, Pooling, PoolingParams, Request
from tests.server.fake_session import VOCAB_SIZE, FakeEncoder, FakeSession, logits_after
from tests.server.small_grammars import small_compiler

if TYPE_CHECKING:  # torch takes seconds to import: see tests/tiers.py
    from quill.model.reference.beam_search import BeamParameters, Hypothesis

CONTEXT = 96


class Harness:
    """An engine with a clock that only tests turn, and all events that came out."""

    def __init__(
        self,
        max_num_seqs: int = 4,
        num_blocks: int = 64,
        step_s: float = 0.0,
        session: Session | None = None,
        **limits: Any,
    ) -> None:
        fields = {"max_num_seqs": max_num_seqs, "num_blocks": num_blocks, "context": CONTEXT}
        self.limits = Limits(**{**fields, **limits})
        kind = FakeEncoder if self.limits.whole_prompts else FakeSession
        self.session = kind(num_blocks, self.limits.block_size)
        self.now_s = 0.0
        self.engine = Engine(session or self.session, self.limits, clock=self._clock)
        self._step_s = step_s  # that a look at the clock takes
        self.started: dict[str, int] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.logprobs: dict[tuple[str, int], list[PositionLogprobs | None]] = defaultdict(list)
        self.prompts: dict[str, list[PositionLogprobs]] = defaultdict(list)
        self.finished: dict[tuple[str, int], FinishEvent] = {}
        self.found: dict[str, list[HypothesisEvent]] = defaultdict(list)  # best first
        self.failed: dict[str, RequestError] = {}
        self.vectors: dict[str, dict[int, list[float]]] = defaultdict(dict)

    def _clock(self) -> float:
        self.now_s += self._step_s
        return self.now_s

    def submit(self, request: Request) -> None:
        asked = request.constraint
        grammar = None if asked is None else small_compiler().compile_now(asked)
        self.engine.submit(request, self.now_s, grammar)

    def step(self) -> EngineOutputs:
        batch = self.engine.step()
        self.note(batch)
        return batch

    def run(self) -> None:
        for _ in range(10_000):
            if self.engine.is_idle:
                return
            self.step()
        raise AssertionError("the engine never comes to rest")

    def note(self, batch: EngineOutputs) -> None:
        for event in batch.events:
            assert event.request_id not in self.failed, "nothing follows the end"
            if isinstance(event, StartEvent):
                assert event.request_id not in self.started
                self.started[event.request_id] = event.cached
            elif isinstance(event, PromptEvent):
                self.prompts[event.request_id] += event.logprobs
            elif isinstance(event, FailEvent):
                self.failed[event.request_id] = event.error
            elif isinstance(event, EmbeddingEvent):
                assert event.request_id in self.started
                assert event.text not in self.vectors[event.request_id]
                self.vectors[event.request_id][event.text] = event.vector_D.tolist()
            elif isinstance(event, HypothesisEvent):
                assert event.sequence == len(self.found[event.request_id])
                self.found[event.request_id].append(event)
            else:
                self._note_sequence(event)

    def _note_sequence(self, event: TokenEvent | FinishEvent) -> None:
        key = (event.request_id, event.sequence)
        assert key not in self.finished, "nothing follows the end"
        assert event.request_id in self.started
        if isinstance(event, TokenEvent):
            self.tokens[key].append(event.token_id)
            self.logprobs[key].append(event.logprobs)
        else:
            self.finished[key] = event

    def check_search(self, request: Request, expected: "Sequence[Hypothesis]") -> None:
        """The hypotheses of a request with beams, and their scores."""
        name = request.request_id
        assert [each.token_ids for each in self.found[name]] == [one.token_ids for one in expected]
        finished = [self.finished[name, i] for i in range(request.num_sequences)]
        scores = [one.score for one in expected]
        assert [each.score for each in finished] == pytest.approx(scores, abs=1e-4)
        for event, finish in zip(self.found[name], finished, strict=True):
            assert finish.usage.generated == len(event.token_ids)
            reported = [each.token_id for each in event.logprobs]
            assert reported == ([] if request.logprobs is None else list(event.token_ids))

    def answer(self, request: Request) -> list[list[int]]:
        return [self.tokens[request.request_id, i] for i in range(request.num_sequences)]


def make_request(name: str = "r", num_prompt: int = 7, **fields: Any) -> Request:
    prompt = tuple((len(name) * 5 + i * i) % VOCAB_SIZE for i in range(num_prompt))
    fields.setdefault("max_new_tokens", 6)
    return Request(request_id=name, **{"prompt_ids": prompt, **fields})


def make_reading(
    name: str, lengths: Sequence[int], pooling: Pooling = "mean", **fields: Any
) -> Request:
    """Texts of so many tokens each."""
    texts = tuple(
        tuple((len(name) * 5 + text * 11 + i * i) % VOCAB_SIZE for i in range(length))
        for text, length in enumerate(lengths)
    )
    reading = PoolingParams(texts=texts, method=pooling)
    return Request(request_id=name, pooling=reading, max_new_tokens=0, **fields)


def reference_search(request: Request, context: int = CONTEXT) -> "list[Hypothesis]":
    """The best answers to a request with beams, by model/reference/beam_search.py."""
    from quill.model.reference.beam_search import search

    longest = min(request.max_new_tokens, context - len(request.prompt_ids))

    def next_logits(rows: Any, parents: Any) -> Any:
        return np.stack([logits_after([*(request.source_ids or ()), *text]) for text in rows])

    return list(search(next_logits, request.prompt_ids, beam_parameters(request), longest))


def beam_parameters(request: Request) -> "BeamParameters":
    from quill.model.reference.beam_search import BeamParameters

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


def as_translation(request: Request) -> Request:
    return dataclasses.replace(request, prompt_ids=(0,), source_ids=request.prompt_ids)
