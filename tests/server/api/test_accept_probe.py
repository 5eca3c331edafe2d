"""The server measures how long calls wait unaccepted, and health tells of it."""

import asyncio

import pytest

from quill.server.api import accept_probe
from tests.server.running import NOT_SERVING, SERVING, health_of, running_server


def value(running: object, name: str) -> float:
    return float(running.server.metrics.registry.get_sample_value(name))  # type: ignore[attr-defined]


def test_calls_that_wait_turn_health_until_they_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrived, may_end = asyncio.Event(), asyncio.Event()

    async def accept(_: object, __: object) -> None:
        arrived.set()
        await may_end.wait()

    monkeypatch.setattr(accept_probe, "accept", accept)
    monkeypatch.setattr(accept_probe, "MAX_UNACCEPTED_S", 0.05)
    monkeypatch.setattr(accept_probe, "PERIOD_S", 0.01)
    with running_server() as running:
        running.call(arrived.wait())
        running.wait_for(lambda: not running.server.health.is_serving)
        assert health_of(running) == NOT_SERVING
        assert value(running, "quill_oldest_unread_call_seconds") >= 0.05
        running._loop.call_soon_threadsafe(may_end.set)
        running.wait_for(lambda: running.server.health.is_serving)
        assert health_of(running) == SERVING


def test_probes_are_neither_logged_nor_counted_and_need_their_secret() -> None:
    with running_server() as running:
        running.wait_for(lambda: running.server._probe._last_s > 0)
        assert running.records.empty()
        assert 0 < value(running, "quill_oldest_unread_call_seconds") < 5
        running.server._probe.secret = "wrong"
        record = running.next_record("INVALID_ARGUMENT")  # an empty request like any other
        assert record.method == "GenerateStream"
