"""JSON of any length is read alike, and nobody waits for long ones."""

import json
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
from tests.turns import num_turns_of_others

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


def test_others_have_their_turns_while_a_long_text_is_read() -> None:
    body = b"[" + b"12345," * 200_000 + b"0]"
    assert num_turns_of_others(lambda: parse_json(body), 0.001) > 10
    assert num_turns_of_others(lambda: json_values._DECODER.decode(body.decode()), 0.001) <= 2
