"""An engine without a model or a thread: whoever tests it turns the clock and notes what came."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from quill.server.engine.engine import Engine
from quill.server.errors import RequestError
from quill.server.limits import Limits
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
from quill.server.request import Pooling, PoolingParams, Request
from tests.server.fake_session import VOCAB_SIZE, FakeEncoder, FakeSession

CONTEXT = 96


class Harness:
    """An engine on a fake session with a clock that only tests turn, and all that came out."""

    def __init__(
        self, max_num_seqs: int = 4, num_blocks: int = 64, step_s: float = 0.0, **limits: Any
    ) -> None:
        fields = {
            "max_num_seqs": max_num_seqs,
            "context": CONTEXT,
            "num_blocks": num_blocks,
            **limits,
        }
        self.limits = Limits(**fields)
        kind = FakeEncoder if self.limits.whole_prompts else FakeSession
        self.session = kind(num_blocks, self.limits.block_size)
        self.now_s = 0.0
        self.engine = Engine(self.session, self.limits, clock=self._clock)
        self._step_s = step_s  # that a look at the clock takes
        self.started: dict[str, int] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.logprobs: dict[tuple[str, int], list[PositionLogprobs | None]] = defaultdict(list)
        self.prompts: dict[str, list[PositionLogprobs]] = defaultdict(list)
        self.finished: dict[tuple[str, int], FinishEvent] = {}
        self.failed: dict[str, RequestError] = {}
        self.vectors: dict[str, dict[int, list[float]]] = defaultdict(dict)

    def _clock(self) -> float:
        self.now_s += self._step_s
        return self.now_s

    def submit(self, request: Request) -> None:
        self.engine.submit(request, self.now_s)

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
            elif not isinstance(event, HypothesisEvent):
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


def as_translation(request: Request) -> Request:
    return dataclasses.replace(request, prompt_ids=(0,), source_ids=request.prompt_ids)
