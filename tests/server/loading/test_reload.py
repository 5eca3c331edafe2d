"""A step that hangs is noticed, said, and forgiven when it ends."""

import logging

import pytest

from quill.server.client.sync_client import Client
from quill.server.loading.reloader import Watchdog
from tests.server.end_to_end.test_lifecycle import Caller, watch_health
from tests.server.running import NOT_SERVING, SERVING, running_server
from tests.server.scripted_session import TIMEOUT_S


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_only_a_step_that_takes_too_long_hangs(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watchdog = Watchdog(10.0, clock)
    with caplog.at_level(logging.INFO):
        assert not watchdog.look(None, lambda: "nothing")
        assert not watchdog.look(90.0, lambda: "a slow one")
        clock.now_s += 1
        assert watchdog.look(90.0, lambda: "a slow one")
        assert watchdog.look(90.0, lambda: "a slow one")
        assert caplog.text.count("a step has run for 11.0 s") == 1
        assert "It is a slow one" in caplog.text
        assert not watchdog.look(100.5, lambda: "the next one")
        assert caplog.text.count("has ended") == 1
        clock.now_s += 20
        assert watchdog.look(100.5, lambda: "the next one"), "and it hangs, too"
        assert "It is the next one" in caplog.text


@pytest.mark.parametrize(("num_steps", "kind"), [(0, "prefill step of 3"), (1, "decode step of 1")])
def test_hanging_step_turns_health_and_says_what_it_is(
    num_steps: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Far more than a step takes that isn't held, also on a busy machine.
    with running_server(watchdog_s=2.0) as running, caplog.at_level(logging.INFO):
        states = watch_health(running)
        assert next(states) == SERVING
        running.session.hold()
        running.session.let_go(num_steps)
        caller = Caller(running, max_new_tokens=4)
        assert next(states) == NOT_SERVING
        assert f"It is a {kind} tokens for the requests " in caplog.text
        running.session.let_go()
        assert next(states) == SERVING
        assert caller.text() == "defg"
        assert running.next_record("OK").request_id in caplog.text
        caller.close()
        with Client(running.address) as client:
            answer = client.generate("abc", max_new_tokens=2, timeout_s=TIMEOUT_S)
        assert answer.sequences[0].text == "de"
        states.close()  # type: ignore[attr-defined]
