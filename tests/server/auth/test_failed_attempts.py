"""Peers that send wrong keys again and again get their rejections later."""

from quill.server.auth import failed_attempts
from quill.server.auth.failed_attempts import BURST, DELAY_S, MAX_PEERS, PER_SECOND, FailedAttempts


def test_a_burst_is_free_and_then_rejections_are_held_back_until_time_has_passed() -> None:
    now_s = 0.0
    attempts = FailedAttempts(lambda: now_s)
    assert {attempts.delay_s("a") for _ in range(int(BURST))} == {0.0}
    assert attempts.delay_s("a") == DELAY_S
    assert attempts.delay_s("b") == 0.0
    now_s = 1 / PER_SECOND
    assert [attempts.delay_s("a"), attempts.delay_s("a")] == [0.0, DELAY_S]


def test_only_so_many_peers_are_remembered() -> None:
    attempts = FailedAttempts(lambda: 0.0)
    for _ in range(int(BURST) + 1):
        attempts.delay_s("first")
    for number in range(MAX_PEERS):
        attempts.delay_s(str(number))
    assert attempts.delay_s("first") == 0.0
    assert len(attempts._buckets) == MAX_PEERS


def test_a_flood_of_held_calls_is_rejected_at_once() -> None:
    attempts = FailedAttempts(lambda: 0.0)
    attempts._num_held = failed_attempts.MAX_HELD
    assert {attempts.delay_s("a") for _ in range(100)} == {0.0}
