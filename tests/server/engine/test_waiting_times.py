"""How long people wait, on a machine whose steps take the time that a formula says."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from quill.server.engine.engine import Engine
from quill.server.engine.model_runner import BlockCopy, Chunk, ModelOutput, Source
from quill.server.outputs import FailEvent, StartEvent, TokenEvent
from quill.server.request import Limits, Request, SamplingParams

CONTEXT = 9000
STEP_S, ROW_S, TOKEN_S, PAST_S = 0.012, 0.0012, 0.0011, 0.0000003


class SlowMachine:
    """About two old cores with a small model. What it says is never the same twice."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_tokens = 0
        self.script: list[int] = []  # what the only row says after a prompt of the same length

    def step(self, chunks: Sequence[Chunk]) -> ModelOutput:
        self.now_s += STEP_S
        for chunk in chunks:
            num_tokens = len(chunk.ids)
            if num_tokens == 1:
                self.now_s += ROW_S
            else:
                self.now_s += num_tokens * (TOKEN_S + PAST_S * (chunk.start + num_tokens / 2))
        num_logits = sum(len(chunk.logits_at) for chunk in chunks)
        logits_LV = np.zeros((num_logits, 997), np.float32)
        for row_V in logits_LV:
            self.num_tokens += 1
            row_V[self.num_tokens**2 * 7919 % 997] = 9
        if self.script and num_logits:
            (chunk,) = chunks
            places = [chunk.start + i + 1 - len(self.script) for i in chunk.logits_at]
            logits_LV[range(num_logits), [self.script[place] for place in places]] = 20
        return ModelOutput(logits_LV, np.empty((0, 1), np.float32))

    def encode(self, sources: Sequence[Source]) -> None:
        self.now_s += sum(TOKEN_S * len(source.ids) for source in sources)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        pass


class Place:
    def __init__(self, **limits: Any) -> None:
        self.machine = SlowMachine()
        fields = {"max_num_seqs": 64, "context": CONTEXT, "num_blocks": 4000, **limits}
        self.engine = Engine(self.machine, Limits(**fields), lambda: self.machine.now_s)
        self.tokens_s: dict[str, list[float]] = defaultdict(list)
        self.asked_s: dict[str, float] = {}
        self._num_asked = 0
        self.num_cached = 0

    def ask(self, name: str, num_prompt: int, num_tokens: int = 8, **fields: Any) -> None:
        self._num_asked += 1
        first = self._num_asked * 10_000
        self.ask_ids(name, tuple(range(first, first + num_prompt)), num_tokens, **fields)

    def ask_ids(self, name: str, ids: tuple[int, ...], num_tokens: int, **fields: Any) -> None:
        request = Request(
            request_id=name,
            prompt_ids=ids,
            max_new_tokens=num_tokens,
            sampling=SamplingParams(temperature=0.0),
            **fields,
        )
        self.asked_s[name] = self.machine.now_s
        self.engine.submit(request, self.machine.now_s)

    def step(self) -> None:
        for event in self.engine.step().events:
            assert not isinstance(event, FailEvent), event
            if isinstance(event, TokenEvent):
                self.tokens_s[event.request_id].append(self.machine.now_s)
            elif isinstance(event, StartEvent):
                self.num_cached += event.cached

    def pass_time(self, time_s: float) -> None:
        end_s = self.machine.now_s + time_s
        while self.machine.now_s < end_s and not self.engine.is_idle:
            self.step()

    def first_token_s(self, name: str) -> float:
        while name not in self.tokens_s:
            self.step()
        return self.tokens_s[name][0] - self.asked_s[name]

    def gaps_s(self, names: list[str], since_s: float) -> list[float]:
        gaps = [b - a for name in names for a, b in pairwise(self.tokens_s[name]) if a > since_s]
        return sorted(gaps)


@pytest.mark.parametrize("num_long", [1, 3])
@pytest.mark.parametrize("num_streams", [0, 1, 8])
def test_short_request_does_not_wait_for_long_prompts(num_long: int, num_streams: int) -> None:
    place = Place()
    for number in range(num_streams):
        place.ask(f"stream {number}", 20, num_tokens=4000)
    place.pass_time(1.0)
    for number in range(num_long):
        place.ask(f"long {number}", 8000)
    waits = []
    for number in range(5):
        place.pass_time(1.7)
        place.ask(f"short {number}", 20)
        waits.append(place.first_token_s(f"short {number}"))
    assert "long 0" not in place.tokens_s
    assert max(waits) < 0.6


def test_long_prompt_at_most_doubles_the_gaps_of_running_streams() -> None:
    place = Place()
    streams = [f"stream {number}" for number in range(8)]
    for name in streams:
        place.ask(name, 20, num_tokens=4000)
    place.pass_time(4.0)
    alone_s = place.gaps_s(streams, 1.0)
    since_s = place.machine.now_s
    place.ask("long", 8000)
    wait_s = place.first_token_s("long")
    beside_s = place.gaps_s(streams, since_s)
    assert beside_s[int(0.95 * len(beside_s))] <= 2 * alone_s[int(0.95 * len(alone_s))]
    work_s = 8000 * (TOKEN_S + PAST_S * 4000)
    assert wait_s < 2.7 * work_s, "and the prompt gets its share"


def test_second_owner_does_not_wait_for_the_firsts_prompts() -> None:
    place = Place()
    for number in range(4):
        place.ask(f"first {number}", 4000, owner="first")
    place.pass_time(0.5)
    place.ask("second", 12, owner="second")
    assert place.first_token_s("second") < 0.6


def test_owners_share_the_time_whoever_sends_more_prompts() -> None:
    place = Place()
    for number in range(6):
        place.ask(f"first {number}", 2000, owner="first")
    place.ask("second", 2000, owner="second")
    wait_s = place.first_token_s("second")
    assert wait_s < 3.0 * 2000 * (TOKEN_S + PAST_S * 1000)
    assert not [name for name in place.tokens_s if name.startswith("first")]


def test_long_prompt_is_prefilled_although_short_ones_never_end() -> None:
    place = Place()
    place.ask("long", 4000)
    number = 0
    while "long" not in place.tokens_s:
        for _ in range(4):
            place.ask(f"short {number}", 100, num_tokens=1)
            number += 1
        place.step()
        place.step()
        assert number < 20_000
    assert place.tokens_s["long"][0] < 64 * 4000 * (TOKEN_S + PAST_S * 2000), "its share"


def test_batch_without_a_common_prefix_is_served_at_the_pace_of_its_prompts() -> None:
    place = Place()
    for number in range(32):
        place.ask(str(number), 70, num_tokens=64)
    waits = sorted(place.first_token_s(str(number)) for number in range(32))
    assert waits[0] < 0.4
    assert waits[-1] < 2.5 * 32 * 70 * TOKEN_S


def test_shared_prefix_is_read_once_and_then_each_first_token_is_near() -> None:
    place = Place()
    beginning = tuple(range(1000))
    for number in range(64):
        own = tuple(range(2000 + 100 * number, 2050 + 100 * number))
        place.ask_ids(str(number), beginning + own, num_tokens=20)
        if number % 2:
            place.pass_time(0.6)
    waits = [place.first_token_s(str(number)) for number in range(64)]
    assert max(waits[:10]) < 2.5 * 1000 * TOKEN_S
    assert max(waits[20:]) < 1.0
    assert place.num_cached == 63 * 992


def test_two_hundred_streams_run_where_a_few_long_ones_fit() -> None:
    place = Place(max_num_seqs=256, num_blocks=1500)
    for number in range(200):
        place.ask(str(number), 30, num_tokens=60)
    most = 0
    while not place.engine.is_idle:
        place.step()
        most = max(most, place.engine._scheduler.num_seqs)
    assert most == 200
    assert all(len(place.tokens_s[str(number)]) == 60 for number in range(200))


@pytest.mark.parametrize("is_known", [True, False])
def test_sequence_that_repeats_its_prompt_is_faster_and_slows_no_other(
    is_known: bool,
) -> None:
    """One in twenty tokens of the known text is another one."""
    text = [7 * i * i % 997 for i in range(400)]
    said = [
        (each if i % 20 else 500 + i) if is_known else i * i * 31 % 997
        for i, each in enumerate(text)
    ]
    took_s = {}
    for speculative in (True, False):
        place = Place(speculative=speculative)
        place.machine.script = said
        place.ask_ids("r", tuple(text), num_tokens=400)
        place.first_token_s("r")
        place.pass_time(60)
        assert len(place.tokens_s["r"]) == 400
        took_s[speculative] = place.tokens_s["r"][-1] - place.tokens_s["r"][0]
    assert took_s[False] > (1.7 if is_known else 0.99) * took_s[True]


def test_owner_with_one_long_answer_saves_up_no_claim_to_read() -> None:
    place = Place()
    place.ask("answer", 20, num_tokens=4000, owner="first")
    for number in range(4):
        place.ask(f"second {number}", 1000, num_tokens=1, owner="second")
    for number in range(4):
        place.first_token_s(f"second {number}")
    for number in range(4):
        place.ask(f"first {number}", 4000, owner="first")
    place.pass_time(0.5)
    place.ask("short", 12, owner="second")
    assert place.first_token_s("short") < 0.6
    assert not [name for name in place.tokens_s if name.startswith("first")]
