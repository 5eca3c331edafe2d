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
    pace.note_decode(decode_s)
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


def _num_read(pace: Pace, cost_s: float, num_waiting: int) -> int:
    """How many prompts of this cost are read between two decode steps."""
    pace.note_decode(0.080)
    pace.note_prefill(4, cost_s, num_waiting)
    num = 1
    while pace.may_go_on:
        pace.note_prefill(4, cost_s, num_waiting)
        num += 1
    return num


def test_short_prompts_share_the_time_of_a_chunk() -> None:
    pace = Pace()
    assert _num_read(pace, 0.020, num_waiting=0) == int(STALL * 0.080 / 0.020)
    assert _num_read(pace, 0.020, num_waiting=9) == int(QUEUE_STALL_S / 0.020)


def test_a_chunk_that_took_its_time_is_alone() -> None:
    assert _num_read(Pace(), STALL * 0.080, num_waiting=0) == 1


def test_what_short_prompts_took_is_taken_off_the_next_chunk() -> None:
    pace = Pace()
    chunk = _settle(pace, 0.080, lambda tokens: 0.014 + 0.0018 * tokens)
    pace.note_decode(0.080)
    pace.note_prefill(4, STALL * 0.080 / 2, num_waiting=0)
    assert pace.max_chunk(num_rows=8) == pytest.approx(chunk / 2, abs=1)
