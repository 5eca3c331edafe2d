"""Which requests are admitted, and that each gets its events."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from quill.server.engine.admission import MAX_RESERVED_S, QueueAdmission
from quill.server.engine.dispatcher import Dispatcher
from quill.server.errors import (
    CancelledError,
    DeadlineError,
    OverloadedError,
    SlowReaderError,
    UnavailableError,
)
from quill.server.frontend.answer import Answer
from quill.server.frontend.spec import ParsedRequest
from quill.server.outputs import (
    EngineOutputs,
    Event,
    FailEvent,
    FinishEvent,
    FinishReason,
    StartEvent,
    Timings,
    TokenEvent,
    Usage,
)
from quill.server.request import Request
from tests.server.running import make_text
from tests.server.scripted_session import token_of

REQUEST = Request(request_id="r", prompt_ids=(1,))


class Engine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.ended: list[tuple[str, int | None, str]] = []

    def submit(self, request: Request) -> None:
        self.submitted.append(request.request_id)

    def end(
        self, request_id: str, sequence: int | None = None, reason: FinishReason = "cancelled"
    ) -> None:
        self.ended.append((request_id, sequence, reason))


def open_dispatcher(**settings: Any) -> Dispatcher:
    dispatcher = Dispatcher(QueueAdmission(4), lambda _: None, **settings)
    dispatcher.open()
    return dispatcher


def token(letter: str) -> TokenEvent:
    return TokenEvent("r", 0, token_of(ord(letter)), None)


FINISH = FinishEvent("r", 0, "length", 7, Usage(1, 0, 3), Timings(1.0, 2.0, 3.0))


def test_reader_that_was_away_gets_one_larger_chunk() -> None:
    async def main() -> list[Event]:
        dispatcher = open_dispatcher()
        async with dispatcher.serve(REQUEST, Engine()) as inbox:
            for letter in "abc":
                dispatcher.publish(EngineOutputs((token(letter),), None))
            dispatcher.publish(EngineOutputs((FINISH,), None))
            await asyncio.sleep(0)  # the loop delivers
            return await inbox.take()

    events = asyncio.run(main())
    (chunk,) = Answer(ParsedRequest(request=REQUEST), make_text(), lambda _: None).take(events)
    assert (chunk.text, len(chunk.token_ids)) == ("abc", 3)
    assert chunk.finish is not None


def test_full_inbox_ends_its_request_and_gives_its_reader_the_error() -> None:
    async def main(engine: Engine) -> list[Event]:
        dispatcher = open_dispatcher(max_unread=2)
        async with dispatcher.serve(REQUEST, engine) as inbox:
            dispatcher.publish(EngineOutputs(tuple(token(letter) for letter in "abcd"), None))
            await asyncio.sleep(0)
            return await inbox.take()

    engine = Engine()
    events = asyncio.run(main(engine))
    assert engine.ended == [("r", None, "cancelled")]
    with pytest.raises(SlowReaderError):
        Answer(ParsedRequest(request=REQUEST), make_text(), lambda _: None).take(events)


def test_reader_that_leaves_early_ends_its_request() -> None:
    async def main(engine: Engine) -> None:
        async with open_dispatcher().serve(REQUEST, engine):
            pass

    engine = Engine()
    asyncio.run(main(engine))
    assert engine.submitted == ["r"]
    assert engine.ended == [("r", None, "cancelled")]


def test_request_that_ended_is_not_ended_again() -> None:
    async def main(engine: Engine) -> None:
        dispatcher = open_dispatcher()
        async with dispatcher.serve(REQUEST, engine) as inbox:
            dispatcher.publish(EngineOutputs((token("a"), FINISH), None))
            await inbox.take()

    engine = Engine()
    asyncio.run(main(engine))
    assert not engine.ended


def test_closed_dispatcher_refuses_and_waits_for_the_last_one() -> None:
    async def main() -> None:
        dispatcher = open_dispatcher()
        async with dispatcher.serve(REQUEST, Engine()):
            dispatcher.close()
            empty = asyncio.ensure_future(dispatcher.wait_until_empty())
            await asyncio.sleep(0)
            assert not empty.done()
            with pytest.raises(UnavailableError):
                async with dispatcher.serve(REQUEST, Engine()):
                    pass
        await asyncio.wait_for(empty, 120)

    asyncio.run(main())


def test_tokens_made_after_a_stop_string_are_dropped() -> None:
    parsed = ParsedRequest(request=REQUEST, stop=("bc",))
    stopped: list[int] = []
    answer = Answer(parsed, make_text(), stopped.append)
    (chunk,) = answer.take([token(letter) for letter in "abcde"])
    assert (chunk.text, len(chunk.token_ids), stopped) == ("a", 3, [0])
    # The engine counts what it made until it was stopped; the client pays for what it got.
    (last,) = answer.take([token("f"), replace(FINISH, usage=Usage(1, 0, 6))])
    assert last.finish is not None
    assert (last.finish.reason, last.finish.usage.generated) == ("stop", 3)
    assert answer.is_over


class Door:
    """An admission with a clock that only tests turn."""

    def __init__(self, max_waiting: int) -> None:
        self.now_s = 0.0
        self.admission = QueueAdmission(max_waiting, clock=lambda: self.now_s)

    def admit(self, name: str, deadline_s: float | None = None, owner: str = "") -> None:
        self.admission.admit(name, owner, deadline_s)

    def flood(self, owner: str) -> int:
        """How many requests of this owner are let in."""
        for number in range(1000):
            try:
                self.admit(f"{owner}-{number}", owner=owner)
            except OverloadedError:
                return number
        raise AssertionError("there is no limit")

    def tell(self, event: Event) -> None:
        ids = (event.request_id,)
        self.admission.leave(*((ids, ()) if isinstance(event, StartEvent) else ((), ids)))


def test_full_queue_refuses_until_somebody_leaves() -> None:
    door = Door(max_waiting=2)
    door.admit("a")
    door.admit("b")
    with pytest.raises(OverloadedError, match="2 requests are waiting") as caught:
        door.admit("c")
    assert caught.value.retry_after_s > 0
    door.tell(StartEvent("a", 0))
    door.admit("c")
    door.tell(FailEvent("b", CancelledError("left")))
    door.admit("d")
    assert door.admission.num_waiting == 2


def test_a_reserved_place_is_taken_by_one_request_or_given_back() -> None:
    door = Door(2)
    admission = door.admission
    place, given_back = admission.reserve(""), admission.reserve("")
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        admission.reserve("")
    admission.leave((), (given_back,))
    admission.admit("a", "", None, place)
    assert admission.num_waiting == 1
    admission.leave((), (place,))
    assert admission.num_waiting == 1, "the request has it now"
    admission.admit("b", "", None, given_back)
    with pytest.raises(OverloadedError):
        admission.admit("c", "", None, place)


def test_a_place_is_reserved_for_a_moment_only() -> None:
    """A client that sends no message doesn't keep it."""
    door = Door(1)
    place = door.admission.reserve("")
    door.now_s += 2 * MAX_RESERVED_S
    door.admit("a")
    with pytest.raises(OverloadedError):
        door.admission.admit("b", "", None, place)


def test_a_reserved_place_is_not_counted_as_a_request_that_waits() -> None:
    door = Door(2)
    place = door.admission.reserve("")
    assert (door.admission.num_waiting, door.admission.num_reserved) == (0, 1)
    door.admission.admit("a", "", None, place)
    assert (door.admission.num_waiting, door.admission.num_reserved) == (1, 0)


def test_places_that_are_reserved_are_no_queue_in_front_of_the_engine() -> None:
    """Else the time in which nobody waited would count as one that a start took."""
    door = Door(8)
    door.admit("a")
    door.admission.reserve("")
    door.admission.leave(("a",), ())
    door.now_s += MAX_RESERVED_S / 2
    door.admit("b")
    door.admission.leave(("b",), ())
    door.admit("c")
    assert door.admission.num_waiting == 1, "without the place"
    assert door.admission.expected_wait_s() == 0.0


def test_deadline_in_the_past_is_refused() -> None:
    door = Door(max_waiting=2)
    door.now_s = 5.0
    with pytest.raises(DeadlineError):
        door.admit("a", deadline_s=5.0)
    assert door.admission.num_waiting == 0


def test_deadline_that_the_queue_is_too_long_for_is_refused() -> None:
    door = Door(max_waiting=100)
    for number in range(12):
        door.admit(str(number))
    for number in range(4):
        door.now_s += 2.0
        door.tell(StartEvent(str(number), 0))
    assert door.admission.expected_wait_s() == pytest.approx(16.0)
    with pytest.raises(OverloadedError, match=r"deadline is in 15\.0 s") as caught:
        door.admit("hopeless", deadline_s=door.now_s + 15)
    assert caught.value.retry_after_s == pytest.approx(8.005)  # the first of 200 a second
    door.admit("hopeful", deadline_s=door.now_s + 17)


def test_requests_that_start_in_one_step_share_the_time_since_the_last_start() -> None:
    """Such as those that take the places of a batch whose answers ended together."""
    door = Door(max_waiting=100)
    for number in range(100):
        door.admit(str(number))
    door.tell(StartEvent("0", 0))
    for first in range(1, 49, 8):
        door.now_s += 4.0
        door.admission.leave([str(first + each) for each in range(8)], ())
    assert door.admission.expected_wait_s() == pytest.approx(51 * 0.5)


def test_clients_that_were_rejected_together_are_not_told_to_come_back_together() -> None:
    door = Door(max_waiting=0)

    def delay_s() -> float:
        with pytest.raises(OverloadedError) as caught:
            door.admit("a")
        return caught.value.retry_after_s

    times = sorted(delay_s() for _ in range(300))
    assert times[0] >= 0.1
    assert max(sum(first <= each < first + 0.05 for each in times) for first in times) <= 11
    door.now_s += 10.0
    assert delay_s() < 0.11, "once they have come"
    for _ in range(100_000):
        delay_s()
    assert delay_s() < 3, "however many they are"


def test_quiet_times_do_not_count_as_waiting() -> None:
    door = Door(max_waiting=100)
    for number in range(5):
        door.now_s += 60.0
        door.admit(str(number))
        door.tell(StartEvent(str(number), 0))
    door.admit("waiting")
    assert door.admission.expected_wait_s() == 0


def test_nobody_with_a_name_takes_more_than_is_left_for_others() -> None:
    door = Door(max_waiting=12)
    assert door.flood("a") == 6
    assert door.flood("b") == 3
    assert door.flood("c") == 2
    assert door.flood("d") == 1
    door = Door(max_waiting=12)
    assert door.flood("") == 12, "without names there is nobody to be fair to"


def test_wait_that_is_expected_is_that_of_ones_own_turns() -> None:
    door = Door(max_waiting=100)
    for number in range(20):
        door.admit(str(number), owner="greedy")
    for number in range(10):
        door.now_s += 1.0
        door.tell(StartEvent(str(number), 0))
    assert door.admission.expected_wait_s("greedy") == pytest.approx(10.0)
    assert door.admission.expected_wait_s("modest") == pytest.approx(2.0)
    door.admit("quick", deadline_s=door.now_s + 3, owner="modest")


def test_one_long_hold_up_is_forgotten_when_requests_start_at_once_again() -> None:
    door = Door(max_waiting=100)
    door.admit("before")
    door.admit("held up")
    door.tell(StartEvent("before", 0))
    door.now_s += 58.0
    door.tell(StartEvent("held up", 0))
    door.admit("after")
    door.now_s += 0.01
    door.tell(StartEvent("after", 0))
    door.admit("one")
    door.admit("two", deadline_s=door.now_s + 5)
    assert door.admission.num_waiting == 2
