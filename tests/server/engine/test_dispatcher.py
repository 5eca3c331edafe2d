"""Events on their way from the engine's thread to their readers."""

import asyncio
from typing import Any

import pytest

from quill.server.engine.dispatcher import Admission, Dispatcher
from quill.server.errors import SlowReaderError, UnavailableError
from quill.server.frontend.answer import Answer
from quill.server.frontend.spec import ParsedRequest
from quill.server.outputs import (
    EngineOutputs,
    Event,
    FinishEvent,
    FinishReason,
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
    dispatcher = Dispatcher(asyncio.get_running_loop(), Admission(4), lambda _: None, **settings)
    dispatcher.open()
    return dispatcher


def token(letter: str) -> TokenEvent:
    return TokenEvent("r", 0, token_of(ord(letter)), None)


FINISH = FinishEvent("r", 0, "length", 7, Usage(1, 0, 3), Timings(1.0, 2.0, 3.0))


def test_reader_that_was_away_gets_one_larger_chunk() -> None:
    async def main() -> list[Event]:
        dispatcher = open_dispatcher()
        with dispatcher.serve(REQUEST, Engine()) as inbox:
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
        with dispatcher.serve(REQUEST, engine) as inbox:
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
        with open_dispatcher().serve(REQUEST, engine):
            pass

    engine = Engine()
    asyncio.run(main(engine))
    assert engine.submitted == ["r"]
    assert engine.ended == [("r", None, "cancelled")]


def test_request_that_ended_is_not_ended_again() -> None:
    async def main(engine: Engine) -> None:
        dispatcher = open_dispatcher()
        with dispatcher.serve(REQUEST, engine) as inbox:
            dispatcher.publish(EngineOutputs((token("a"), FINISH), None))
            await inbox.take()

    engine = Engine()
    asyncio.run(main(engine))
    assert not engine.ended


def test_closed_dispatcher_refuses_and_waits_for_the_last_one() -> None:
    async def main() -> None:
        dispatcher = open_dispatcher()
        with dispatcher.serve(REQUEST, Engine()):
            dispatcher.close()
            empty = asyncio.ensure_future(dispatcher.wait_until_empty())
            await asyncio.sleep(0)
            assert not empty.done()
            with pytest.raises(UnavailableError), dispatcher.serve(REQUEST, Engine()):
                pass
        await asyncio.wait_for(empty, 10)

    asyncio.run(main())


def test_tokens_made_after_a_stop_string_are_dropped() -> None:
    parsed = ParsedRequest(request=REQUEST, stop=("bc",))
    stopped: list[int] = []
    answer = Answer(parsed, make_text(), stopped.append)
    (chunk,) = answer.take([token(letter) for letter in "abcde"])
    assert (chunk.text, len(chunk.token_ids), stopped) == ("a", 3, [0])
    (last,) = answer.take([token("f"), FINISH])
    assert last.finish is not None
    assert (last.finish.reason, last.finish.usage.generated) == ("stop", 3)
    assert answer.is_over
