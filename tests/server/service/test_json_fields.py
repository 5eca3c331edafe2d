"""Fields of JSON objects: what is read, ignored and refused."""

from typing import Any

import pytest

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError
from quill.server.service.generation_options import OPTIONS, REFUSED, as_written, fill
from quill.server.service.json_fields import STRINGS, Field, from_texts, read_fields


def read(**body: Any) -> dict[str, Any]:
    return read_fields(body, OPTIONS, REFUSED)


def test_unset_null_and_unknown_fields_arent_there() -> None:
    assert read(temperature=None, nonsense={"a": 1}, top_k=5) == {"top_k": 5}


@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_anything_but_an_object_is_refused(body: Any) -> None:
    with pytest.raises(InvalidFieldError, match="must be a JSON object"):
        read_fields(body, OPTIONS)


def test_required_fields_say_what_they_are() -> None:
    with pytest.raises(InvalidFieldError, match="stop is missing: give words"):
        read_fields({"stop": None}, [Field("stop", STRINGS, "words", is_required=True)])


def test_options_become_the_messages_fields() -> None:
    message = pb.GenerateRequest()
    fill(
        message,
        read(
            max_tokens=5, temperature=1, top_k=-1, seed=-1, stop="a", logit_bias={"7": -3},
            stop_token_ids=[1, 2], priority=4, n=2.0, min_tokens=1, early_stopping="never",
        ),
    )  # fmt: skip
    assert message == pb.GenerateRequest(
        max_new_tokens=5, temperature=1, top_k=0, seed=2**64 - 1, stop=["a"], logit_bias={7: -3},
        stop_token_ids=[1, 2], priority=-4, num_sequences=2, min_new_tokens=1,
        early_stopping=pb.EARLY_STOPPING_NEVER,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [("top_k", 2**31), ("stop_token_ids", [2**40])])
def test_numbers_that_no_field_holds_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        fill(pb.GenerateRequest(), read(**{name: value}))
    assert caught.value.field == name


def test_every_option_names_a_field_that_exists() -> None:
    fields = pb.GenerateRequest.DESCRIPTOR.fields_by_name
    assert [option.into for option in OPTIONS if option.into not in fields] == []


def test_errors_have_the_name_that_was_written() -> None:
    error = InvalidFieldError("max_new_tokens", "is 0")
    also = (*OPTIONS, Field("max_completion_tokens", STRINGS, "", "max_new_tokens"))
    assert str(as_written(error, {}, also)) == "max_tokens is 0"
    assert str(as_written(error, {"max_completion_tokens": 0}, also)) == (
        "max_completion_tokens is 0"
    )
    assert as_written(InvalidFieldError("input", "is missing"), {}, also).field == "input"


def test_values_may_come_as_strings_where_a_door_says_so() -> None:
    given = {"temperature": "0.5", "max_tokens": "7", "ignore_eos": "True", "stop": "5", "x": "1"}
    assert from_texts(given, OPTIONS) == {
        "temperature": 0.5, "max_tokens": 7, "ignore_eos": True, "stop": "5", "x": "1",
    }  # fmt: skip
    with pytest.raises(InvalidFieldError, match="max_tokens can't be read; it must be integer"):
        from_texts({"max_tokens": "many"}, OPTIONS)
