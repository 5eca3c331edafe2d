"""JSON of any length is read alike, and nobody waits for long ones."""

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quill.server.frontend import json_values
from quill.server.frontend.json_values import (
    MAX_CONTAINERS,
    MAX_INLINE_BYTES,
    JsonError,
    parse_json,
)

PADDING = b" " * MAX_INLINE_BYTES  # makes any text a long one
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_long_texts_are_read_as_short_ones(content: Any) -> None:
    body = json.dumps(content).encode()
    assert parse_json(body) == parse_json(body + PADDING) == content


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1,]", b"NaN", b"[Infinity]", b'{"a":1 "b":2}', b"\xff", b"[" * 20_000],
)
def test_what_is_no_json_is_refused_whatever_its_length(body: bytes) -> None:
    for each in (body, PADDING + body):
        with pytest.raises(JsonError, match="isn't JSON"):
            parse_json(each)


@pytest.mark.parametrize("body", [rb'"\ud800"', rb'{"a": [{"\udc00": 1}]}', rb'"\ud83d\u0041"'])
def test_half_pairs_are_refused_wherever_they_are(body: bytes) -> None:
    for each in (body, PADDING + body):
        with pytest.raises(JsonError, match="surrogate"):
            parse_json(each)
    assert parse_json(PADDING + rb'"\ud83d\ude00"') == "😀"


def test_more_containers_than_any_request_has_are_refused() -> None:
    lists, objects = b"[],", b'{"a":{}},'
    for each in (lists, objects):
        with pytest.raises(JsonError, match=f"at most {MAX_CONTAINERS}"):
            parse_json(b"[" + each * MAX_CONTAINERS + b"0]")


def num_python_calls(work: Callable[[], object]) -> int:
    """Threads may switch at each call of a Python function, and nowhere in C code."""
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return num_calls


def test_other_threads_may_run_while_a_long_text_is_read() -> None:
    num_entries = MAX_INLINE_BYTES
    body = b"[" + b"1," * num_entries + b"0]"
    assert num_python_calls(lambda: parse_json(body)) > num_entries
    assert num_python_calls(lambda: json_values._DECODER.decode(body.decode())) < 10
