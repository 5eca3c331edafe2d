"""Many requests through one engine, with chance in charge of when they come."""

import random
from collections import defaultdict
from collections.abc import Callable

from quill.server.engine.engine import Engine
from quill.server.grammar.compiler import Compiler
from quill.server.outputs import FailEvent, PositionLogprobs, TokenEvent
from quill.server.request import Request

Answers = dict[tuple[str, int], list[PositionLogprobs]]  # by request and sequence


def together(
    engine: Engine, requests: list[Request], rng: random.Random, grammars: Compiler | None = None
) -> Answers:
    """All requests through one engine, arriving at random moments."""
    answers: Answers = defaultdict(list)
    waiting = list(requests)
    while waiting or not engine.is_idle:
        if waiting and rng.random() < 0.3:
            request = waiting.pop(0)
            grammar = None
            if request.constraint is not None and grammars is not None:
                grammar = grammars.compile_now(request.constraint)
            engine.submit(request, 0.0, grammar)
        for event in engine.step().events:
            assert not isinstance(event, FailEvent), event
            if isinstance(event, TokenEvent):
                assert event.logprobs is not None
                answers[event.request_id, event.sequence].append(event.logprobs)
    return answers


def restless_clock(rng: random.Random) -> Callable[[], float]:
    """Steps seem to take any time, so chunks get any length."""
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += rng.choice([0.001, 0.01, 0.1, 1.0])
        return now_s

    return clock
