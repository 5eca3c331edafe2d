"""Chunks take about as long as a decode step."""

from collections.abc import Callable

import pytest

from server.pace import MIN_CHUNK, MIN_STALL_S, QUEUE_STALL_S, STALL, Pace


def _settle(
    pace: Pace, decode_s: float, cost_s: Callable[[int], float], num_waiting: int = 0
) -> int:
    for _ in range(40):
        pace.note_decode(decode_s)
        chunk = pace.max_chunk(num_rows=8)
        pace.note_prefill(chunk, cost_s(chunk), num_waiting)
    return pace.max_chunk(num_rows=8)


@pytest.mark.parametrize("decode_s", [0.040, 0.080, 0.2])
def test_chunk_grows_or_shrinks_to_the_time_of_a_decode_step(decode_s: float) -> None:
    chunk = _settle(Pace(), decode_s, lambda tokens: 0.014 + 0.0018 * tokens)
    assert 0.014 + 0.0018 * chunk == pytest.approx(STALL * decode_s, rel=0.15)


def test_chunk_keeps_a_useful_time_where_decode_steps_are_short() -> None:
    chunk = _settle(Pace(), 0.002, lambda tokens: 0.001 * tokens)
    assert 0.001 * chunk == pytest.approx(MIN_STALL_S, rel=0.15)


def test_chunk_may_take_longer_while_more_requests_wait() -> None:
    chunk = _settle(Pace(), 0.002, lambda tokens: 0.001 * tokens, num_waiting=3)
    assert 0.001 * chunk == pytest.approx(QUEUE_STALL_S, rel=0.15)


def test_chunk_never_gets_uselessly_short_and_grows_again() -> None:
    pace = Pace()
    assert _settle(pace, 0.001, lambda tokens: 10.0) == MIN_CHUNK
    chunk = _settle(pace, 0.080, lambda tokens: 0.030 + 0.0018 * tokens)
    assert 0.030 + 0.0018 * chunk == pytest.approx(STALL * 0.080, rel=0.15)


def test_chunk_is_as_long_as_allowed_when_nobody_runs() -> None:
    pace = Pace(max_chunk=100)
    _settle(pace, 0.001, lambda tokens: 10.0)
    assert pace.max_chunk(num_rows=0) == 100


def test_short_prompts_do_not_lengthen_chunks() -> None:
    pace = Pace()
    before = pace.max_chunk(num_rows=1)
    for _ in range(10):
        pace.note_decode(0.05)
        pace.note_prefill(3, 0.001, num_waiting=0)
    assert pace.max_chunk(num_rows=1) == before
