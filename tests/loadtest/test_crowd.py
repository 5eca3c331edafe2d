"""What the users of one process share."""

from itertools import islice

from loadtest.asking import Facts
from loadtest.crowd import Plan, Schedule

FACTS = Facts(vocab_size=512, context=128, has_tokenizer=False, has_template=False)


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


def test_several_processes_together_ask_what_one_would_ask() -> None:
    plan = Plan(max_requests=11)
    parts = [drain(Schedule(plan, FACTS, part, 3)) for part in range(3)]
    assert (
        sorted(index for part in parts for index in part)
        == drain(Schedule(plan, FACTS))
        == list(range(11))
    )
    asked = [Schedule(plan, FACTS, part, 3).ask(5).request for part in range(3)]
    assert asked[0] == asked[1] == asked[2]


def test_crowd_is_over_when_the_time_is_up_and_done_when_nothing_runs() -> None:
    clock = Clock()
    schedule = Schedule(Plan(duration_s=10), FACTS, clock=clock)
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
    schedule = Schedule(Plan(duration_s=10, rate=1), FACTS, clock=clock)
    clock.now_s += 11
    assert schedule.next_index(intended_s=109.9) == 0
    assert schedule.next_index(intended_s=110.1) is None


def test_only_the_first_user_gets_the_arrivals() -> None:
    schedule = Schedule(Plan(rate=4), FACTS, 0, 2, clock=Clock())
    starts = schedule.take_arrivals()
    assert starts is not None
    assert schedule.take_arrivals() is None
    times = list(islice(starts, 400))
    assert times[0] > 100
    # One of two processes makes half of the rate.
    assert 150 < times[-1] - 100 < 250


def test_answers_are_shortened_when_asked_for() -> None:
    short = Schedule(Plan(max_new_tokens=3), FACTS)
    assert all(short.ask(index).request.max_new_tokens <= 3 for index in range(20))
    assert Schedule(Plan(), FACTS).ask(0).request.max_new_tokens >= 8
