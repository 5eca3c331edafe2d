"""A number in a header, and whatever else may stand there."""

import pytest

from quill.server.balancing_headers import read_load, write_load


def test_number_comes_back() -> None:
    assert read_load(write_load(0)) == 0
    assert read_load((("user-agent", "x"), *write_load(17))) == 17


@pytest.mark.parametrize("told", ["", "-1", "1.5", "many", "1e9", "²", "9" * 10, b"3"])
def test_what_is_no_number_says_nothing(told: str | bytes) -> None:
    assert read_load((("quill-load", told),)) is None


def test_silence_says_nothing() -> None:
    assert read_load(None) is None
    assert read_load(()) is None
