"""Who runs in a step, and who waits for a row or for blocks."""

from typing import Any

import numpy as np
import pytest

from quill.server.engine.fair_queue import cost
from quill.server.engine.scheduler import PREEMPTED, RUNNING, WAITING, Scheduler
from quill.server.engine.sequence import SequenceStatus
from quill.server.engine.step import Choice, SchedulerOutput, StepOutput
from quill.server.outputs import FinishEvent, TokenEvent
from quill.server.request import BeamParams, Limits, Request

CONTEXT = 128


class SchedulerHarness:
    """Runs steps without a model: row i of a request says i, and then i + 1, and so on."""

    def __init__(self, max_num_seqs: int = 4, num_blocks: int = 64, **limits: Any) -> None:
        fields = {
            "max_num_seqs": max_num_seqs,
            "context": CONTEXT,
            "num_blocks": num_blocks,
            **limits,
        }
        self.scheduler = Scheduler(Limits(**fields))
        self.steps: list[SchedulerOutput] = []
        self.finished: dict[tuple[str, int], str] = {}

    def step(self) -> StepOutput | None:
        step = self.scheduler.schedule()
        if step is None:
            return None
        self.steps.append(step)
        choices = []
        for each in step.chunks:
            tokens = [one.index + len(one.token_ids) for one in each.to_sample]
            tokens += [tokens[-1] + i + 1 for i in range(len(each.draft))]
            choices.append([Choice(token, None, is_finite=True) for token in tokens])
        hidden = [np.ones((len(each.chunk.hidden_at), 1), np.float32) for each in step.chunks]
        output = StepOutput(choices, hidden, {}, {})
        self.scheduler.update(step, output)
        for event in output.events:
            if isinstance(event, FinishEvent):
                self.finished[event.request_id, event.sequence] = event.reason
        return output

    def run(self) -> None:
        while self.step() is not None:
            assert len(self.steps) < 10_000

    def starts(self) -> list[str]:
        return [group.request_id for step in self.steps for group in step.started]


def _request(name: str = "r", num_prompt: int = 5, **fields: Any) -> Request:
    first = sum(map(ord, name)) * 1000
    prompt = tuple(range(first, first + num_prompt))
    fields.setdefault("max_new_tokens", 4)
    return Request(request_id=name, **{"prompt_ids": prompt, **fields})


def test_prompt_is_prefilled_and_then_each_step_reads_a_token() -> None:
    harness = SchedulerHarness()
    harness.scheduler.add(_request(num_prompt=20))
    harness.run()
    chunks = [[tuple(part.chunk[:2]) for part in step.chunks] for step in harness.steps]
    prompt = _request(num_prompt=20).prompt_ids
    assert chunks == [[(prompt, 0)], [((0,), 20)], [((1,), 21)], [((2,), 22)]]
    assert [step.kind for step in harness.steps] == ["prefill", "decode", "decode", "decode"]
    assert harness.finished == {("r", 0): "length"}


def test_prompts_are_prefilled_beside_running_sequences_which_come_first() -> None:
    harness = SchedulerHarness()
    harness.scheduler.add(_request("running", max_new_tokens=40))
    harness.step()
    for name in ("a", "b"):
        harness.scheduler.add(_request(name, num_prompt=8))
    harness.scheduler.observe(harness.steps[-1], 0.001)
    harness.step()
    step = harness.steps[-1]
    assert step.kind == "mixed"
    assert step.chunks[0].group.request_id == "running"
    assert {part.group.request_id for part in step.prefill} == {"a", "b"}


def test_several_answers_share_the_prompts_blocks_and_part_where_they_write() -> None:
    harness = SchedulerHarness(speculative=False)
    harness.scheduler.add(_request(num_prompt=40, num_sequences=3))
    harness.step()
    harness.step()
    blocks = [list(part.chunk.blocks) for part in harness.steps[-1].decode]
    assert len({tuple(each[:2]) for each in blocks}) == 1
    assert len({each[2] for each in blocks}) == 3
    assert len(harness.steps[-1].copies) == 2
    harness.run()
    assert not any(step.copies for step in harness.steps[2:])
    assert harness.scheduler.num_blocks_used == 0


def test_logits_are_wanted_at_a_prompts_end_only_or_everywhere_if_it_is_scored() -> None:
    harness = SchedulerHarness()
    harness.scheduler.add(_request("plain", num_prompt=100, max_new_tokens=1))
    harness.run()
    wanted = [list(part.chunk.logits_at) for step in harness.steps for part in step.prefill]
    assert wanted[:-1] == [[]] * (len(wanted) - 1)
    assert len(wanted[-1]) == 1
    harness.steps.clear()
    harness.scheduler.add(_request("plain", num_prompt=100, prompt_logprobs=0, max_new_tokens=0))
    harness.run()
    parts = [part for step in harness.steps for part in step.prefill]
    assert parts[0].chunk.start == 0, "nothing comes from the cache"
    assert [len(part.chunk.logits_at) for part in parts] == [len(part.chunk.ids) for part in parts]
    assert max(len(part.chunk.ids) for part in parts) <= 64
    assert harness.finished["plain", 0] == "length"


def test_request_that_needs_much_is_overtaken_by_little() -> None:
    harness = SchedulerHarness(max_num_seqs=2)
    harness.scheduler.add(_request("one", max_new_tokens=100))
    harness.step()
    harness.scheduler.add(_request("two", num_sequences=2, num_prompt=100))
    for number in range(20):
        harness.scheduler.add(_request(f"late {number}"))
    harness.run()
    starts = harness.starts()
    assert 1 < starts.index("two") < 6, "its own cost is that of three others"


@pytest.mark.parametrize("num_new", [20, 60])
def test_request_starts_when_there_are_blocks_for_its_prompt(num_new: int) -> None:
    harness = SchedulerHarness(num_blocks=8)
    harness.scheduler.add(_request("one", num_prompt=60, max_new_tokens=20))
    harness.step()
    harness.scheduler.add(_request("two", num_prompt=60, max_new_tokens=num_new))
    harness.step()
    assert harness.starts() == ["one"]
    harness.run()
    assert harness.starts() == ["one", "two"]


def test_youngest_is_preempted_and_the_oldest_never() -> None:
    harness = SchedulerHarness(num_blocks=8, speculative=False)
    for name in ("old", "young"):
        harness.scheduler.add(_request(name, num_prompt=30, max_new_tokens=90))
    harness.run()
    assert harness.scheduler.num_preempted >= 1
    assert list(harness.finished) == [("old", 0), ("young", 0)]
    assert harness.starts() == ["old", "young"], "each is told once"
    old = [step for step in harness.steps for p in step.chunks if p.group.request_id == "old"]
    assert len(old) == 90, "not one step without it"


def test_preempted_requests_wait_before_all_others_the_oldest_first() -> None:
    harness = SchedulerHarness(max_num_seqs=8, num_blocks=12, block_size=4, speculative=False)
    for name in "abcdef":
        harness.scheduler.add(_request(name, num_prompt=8, max_new_tokens=30))
    most = 0
    while not harness.scheduler.is_empty:
        running = harness.scheduler.groups(RUNNING)
        harness.step()
        preempted = [group for group in running if group in harness.scheduler.groups(PREEMPTED)]
        waiting = harness.scheduler.waiting()
        assert waiting[: len(preempted)] == preempted
        statuses = [group.status for group in waiting]
        assert statuses == sorted(statuses, key=[PREEMPTED, WAITING].index)
        most = max(most, statuses.count(PREEMPTED))
    assert most > 1


def test_request_that_never_fits_is_our_bug_and_limits_say_so() -> None:
    limits = Limits(max_num_seqs=4, context=CONTEXT, num_blocks=8)
    cases = {
        ("plain", 1, 30, 98): True,
        ("prompt and answer fill the context", 1, 100, 10**6): True,
        ("three answers share the prompt", 3, 100, 12): False,
        ("three short answers share the prompt", 3, 64, 16): True,
        ("too many rows", 5, 1, 1): False,
    }
    for (name, num_sequences, num_prompt, num_new), fits in cases.items():
        request = _request(
            "r", num_prompt=num_prompt, max_new_tokens=num_new, num_sequences=num_sequences
        )
        assert limits.fits(request) == fits, name
    source = Request(request_id="s", prompt_ids=(0,), source_ids=(1,) * 120, max_new_tokens=16)
    assert not limits.fits(source)
    with pytest.raises(AssertionError):
        Scheduler(limits).add(source)
    beams = _request(num_prompt=64, max_new_tokens=33, beams=BeamParams(num_beams=2))
    assert not limits.fits(beams)


@pytest.mark.parametrize(("stop", "reason"), [(99, "length"), (6, "stop")])
def test_accepted_draft_tokens_save_steps_and_change_nothing(stop: int, reason: str) -> None:
    tokens: dict[bool, list[int]] = {}
    for speculative in (True, False):
        harness = SchedulerHarness(speculative=speculative)
        prompt = (90, *range(20), 91)  # the answer will be 0, 1, 2 ...
        fields: dict[str, Any] = {"max_new_tokens": 12, "stop_ids": frozenset({stop})}
        harness.scheduler.add(Request(request_id="r", prompt_ids=prompt, **fields))
        tokens[speculative] = []
        while (output := harness.step()) is not None:
            tokens[speculative] += [
                each.token_id for each in output.events if isinstance(each, TokenEvent)
            ]
            (*sequences,) = (one for each in harness.scheduler.groups() for one in each.sequences)
            assert all(each.num_computed == each.num_tokens - 1 for each in sequences)
        assert harness.finished["r", 0] == reason
        num_asked = [len(part.chunk.ids) for step in harness.steps for part in step.decode]
        assert (max(num_asked) > 1) == speculative
        assert (len(harness.steps) < len(tokens[speculative])) == speculative
    assert tokens[True] == tokens[False] == list(range(min(12, stop + 1)))


def test_rejected_draft_tokens_are_forgotten() -> None:
    harness = SchedulerHarness()
    prompt = (90, 0, 1, 2, 55, 56, 57, 91)
    harness.scheduler.add(Request(request_id="r", prompt_ids=prompt, max_new_tokens=30))
    tokens = []
    while (output := harness.step()) is not None:
        tokens += [each.token_id for each in output.events if isinstance(each, TokenEvent)]
    assert tokens == list(range(30))
    drafted = [tuple(part.draft) for step in harness.steps for part in step.decode]
    assert any(drafted)
    assert sum(map(bool, drafted)) < 3


def test_request_removed_while_its_prompt_is_prefilled_gives_its_blocks_back() -> None:
    harness = SchedulerHarness(max_num_seqs=1)
    harness.scheduler.add(_request("gone", num_prompt=100))
    harness.step()
    assert harness.scheduler.num_blocks_used
    (group,) = harness.scheduler.groups(RUNNING)
    harness.scheduler.remove(group, SequenceStatus.FINISHED_CANCELLED)
    assert harness.scheduler.num_blocks_used == harness.scheduler.num_seqs == 0
    assert harness.step() is None


def test_preempted_text_that_is_wholly_known_runs_on_though_nobody_else_runs() -> None:
    harness = SchedulerHarness(num_blocks=10, block_size=4, context=40)
    harness.scheduler.add(_request("old", num_prompt=6, max_new_tokens=18))
    harness.step()
    twin = _request("first", num_prompt=6, max_new_tokens=30)
    harness.scheduler.add(twin)
    for _ in range(5):
        harness.step()
    # It is set back; the first twin writes the same blocks, and then nobody is left but it.
    harness.scheduler.add(_request("second", prompt_ids=twin.prompt_ids, max_new_tokens=30))
    harness.run()
    assert harness.scheduler.num_preempted >= 1
    assert set(harness.finished) == {("old", 0), ("first", 0), ("second", 0)}


@pytest.mark.parametrize("num_prompt", range(1, 9))
def test_step_that_should_be_a_decode_alone_and_finds_no_block_is_given_up(num_prompt: int) -> None:
    # The long prompt may set the row back that takes its blocks, but not while it has to pause.
    harness = SchedulerHarness(num_blocks=32, block_size=4, speculative=False, max_prefill_tokens=4)
    harness.scheduler.add(_request("long", num_prompt=112, max_new_tokens=1))
    harness.step()
    harness.scheduler.add(_request("row", num_prompt=num_prompt, max_new_tokens=60))
    for _ in range(200):
        if harness.step() is not None:
            harness.scheduler.observe(harness.steps[-1], 0.02)
    assert set(harness.finished) == {("long", 0), ("row", 0)}


def test_request_that_is_preempted_again_and_again_is_overtaken_by_its_own_cost_at_most() -> None:
    harness = SchedulerHarness(num_blocks=36, block_size=4, speculative=False, prefix_caching=False)
    scheduler, overtaken = harness.scheduler, 0
    big = _request("big", num_prompt=60, max_new_tokens=28, owner="big")
    for number in range(600):
        for place in range(scheduler.num_waiting, 3):
            name = f"little {number} {place}"
            scheduler.add(_request(name, num_prompt=4, max_new_tokens=100))
        if number == 10:
            scheduler.add(big)
        waiting = scheduler.waiting()
        harness.step()
        running = scheduler.groups(RUNNING)
        if waiting[0].request is big and waiting[0] not in running:
            overtaken += sum(cost(each.request) for each in waiting if each in running)
        assert overtaken <= cost(big)
    assert scheduler.num_preempted >= 1
    assert ("big", 0) in harness.finished
