"""What the log leaves out."""

import asyncio
import logging
import sys

import pytest

from quill.server.telemetry.call_record import is_news


def record_of(error: BaseException) -> logging.LogRecord:
    try:
        raise error
    except BaseException:
        return logging.makeLogRecord({"msg": "it failed", "exc_info": sys.exc_info()})


@pytest.mark.parametrize(("error", "told"), [(asyncio.CancelledError(), False), (OSError(), True)])
def test_only_cancelled_calls_are_left_out(error: BaseException, told: bool) -> None:
    assert is_news(record_of(error)) == told


def test_a_line_without_an_error_is_told() -> None:
    assert is_news(logging.makeLogRecord({"msg": "ready"}))
