"""What the users of one process share."""

import argparse
from dataclasses import fields
from itertools import islice

from quill.loadtest.workload.request import ModelInfo
from quill.loadtest.workload.schedule import Plan, Schedule

INFO = ModelInfo(vocab_size=512, context=128, has_tokenizer=False, has_template=False)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def drain(schedule: Schedule) -> list[int]:
    found = []
    while (index := schedule.next_index()) is not None:
        found.append(index)
    return found


def test_plan_survives_the_command_line() -> None:
    plan = Plan("mixed", 7, 11, 2.5, 3.5, 1.25, 9, 4.5)
    words = plan.arguments()
    parser = argparse.ArgumentParser()
    for each in fields(Plan):
        parser.add_argument(f"--{each.metadata['option']}", type=type(each.default))
    assert Plan.from_options(parser.parse_args(words)) == plan


def test_seed_that_nobody_chose_is_a_new_one_each_time() -> None:
    assert Plan(seed=5).with_seed().seed == 5
    first, second = Plan().with_seed(), Plan().with_seed()
    assert 0 not in (first.seed, second.seed)
    assert first.seed != second.seed


def test_several_processes_together_ask_what_one_would_ask() -> None:
    plan = Plan(max_requests=11)
    parts = [drain(Schedule(plan, INFO, part, 3)) for part in range(3)]
    assert (
        sorted(index for part in parts for index in part)
        == drain(Schedule(plan, INFO))
        == list(range(11))
    )
    loads = [Schedule(plan, INFO, part, 3).request(5).request for part in range(3)]
    assert loads[0] == loads[1] == loads[2]


def test_requests_end_when_the_drain_does() -> None:
    """However long their own deadlines are: a search's step of 6 s waited for minutes."""
    clock = Clock()
    schedule = Schedule(Plan(duration_s=6, drain_s=30), INFO, clock=clock)
    assert schedule.request(0).timeout_s == 36
    clock.now_s += 5
    assert schedule.request(1).timeout_s == 31
    clock.now_s += 50
    assert schedule.request(2).timeout_s > 0
    short = Schedule(Plan("deadlines", duration_s=6, drain_s=30), INFO, clock=clock).request(0)
    assert short == Schedule(Plan("deadlines"), INFO).request(0)


def test_load_is_over_when_the_time_is_up_and_done_when_nothing_runs() -> None:
    clock = Clock()
    schedule = Schedule(Plan(duration_s=10), INFO, clock=clock)
    assert schedule.next_index() == 0
    schedule.num_running = 1
    clock.now_s += 10
    assert schedule.next_index() is None
    assert schedule.is_over()
    assert not schedule.is_done()
    schedule.num_running = 0
    assert schedule.is_done()


def test_request_that_was_due_in_time_is_made_even_if_it_is_late() -> None:
    clock = Clock()
    schedule = Schedule(Plan(duration_s=10, rate=1), INFO, clock=clock)
    clock.now_s += 11
    assert schedule.next_index(intended_s=109.9) == 0
    assert schedule.next_index(intended_s=110.1) is None


def test_only_the_first_user_gets_the_arrivals() -> None:
    schedule = Schedule(Plan(rate=4), INFO, 0, 2, clock=Clock())
    starts = schedule.take_arrivals()
    assert starts is not None
    assert schedule.take_arrivals() is None
    times = list(islice(starts, 400))
    assert times[0] > 100
    # One of two processes makes half of the rate.
    assert 150 < times[-1] - 100 < 250


def test_answers_are_shortened_when_asked_for() -> None:
    short = Schedule(Plan(max_new_tokens=3), INFO)
    assert all(short.request(index).request.max_new_tokens <= 3 for index in range(20))
    assert Schedule(Plan(), INFO).request(0).request.max_new_tokens >= 8
