"""Fields of JSON objects: what is read, ignored and rejected, and what it is called in errors."""

from typing import Any

import pytest

from quill.server.errors import InvalidFieldError
from quill.server.fields import GENERATE
from quill.server.frontend.json_options import OPTIONS, UNSUPPORTED, generate_spec
from quill.server.frontend.json_values import STRING, JsonField, from_texts, read_fields
from quill.server.frontend.spec import GenerateSpec, renamed


def read(**body: Any) -> GenerateSpec:
    return generate_spec(None, read_fields(body, OPTIONS, UNSUPPORTED), OPTIONS, {})


def test_unset_null_and_unknown_fields_arent_there() -> None:
    assert read(temperature=None, nonsense={"a": 1}, top_k=5).options == {"top_k": 5}


@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_anything_but_an_object_is_rejected(body: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read_fields(body, OPTIONS)
    assert caught.value.field == "body"


def test_required_fields_are_missed_by_name() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read_fields({"stop": None}, [JsonField("stop", STRING, "words", is_required=True)])
    assert caught.value.field == "stop"


def test_json_names_and_conventions_become_ours() -> None:
    spec = read(
        max_tokens=5, temperature=1, top_k=-1, seed=-1, stop="a", logit_bias={"7": -3},
        stop_token_ids=[1, 2], priority=4, n=2.0, min_tokens=1, early_stopping="never",
    )  # fmt: skip
    assert spec.options == {
        "max_new_tokens": 5, "temperature": 1, "top_k": 0, "seed": 2**64 - 1, "stop": ["a"],
        "logit_bias": {7: -3}, "stop_token_ids": [1, 2], "priority": -4, "num_sequences": 2,
        "min_new_tokens": 1, "early_stopping": "never",
    }  # fmt: skip


def test_a_later_alias_goes_before() -> None:
    assert read(max_tokens=5, max_completion_tokens=6).options == {"max_new_tokens": 6}


def test_every_option_is_one_of_the_table() -> None:
    assert {each.option for each in OPTIONS} == {*GENERATE, "constraint"} - {"logprobs", "echo"}


def test_only_one_constraint_is_taken() -> None:
    assert read(guided_regex="a").constraint == ("regex", "a")
    with pytest.raises(InvalidFieldError) as caught:
        read(guided_regex="a", guided_choice=["b"])
    assert caught.value.field == "guided_choice"


def test_errors_have_the_name_that_the_client_wrote() -> None:
    error = InvalidFieldError("max_new_tokens", "is 0")
    assert str(renamed(error, read().names)) == "max_tokens is 0"
    written = read(max_completion_tokens=0).names
    assert str(renamed(error, written)) == "max_completion_tokens is 0"
    constraint = InvalidFieldError("constraint.regex", "is empty")
    assert renamed(constraint, read(guided_regex="").names).field == "guided_regex"
    assert renamed(InvalidFieldError("input", "is missing"), read().names).field == "input"


def test_values_may_come_as_strings_where_a_wire_has_only_those() -> None:
    given = {"temperature": "0.5", "max_tokens": "7", "ignore_eos": "True", "stop": "5", "x": "1"}
    assert from_texts(given, OPTIONS) == {
        "temperature": 0.5, "max_tokens": 7, "ignore_eos": True, "stop": "5", "x": "1",
    }  # fmt: skip
    with pytest.raises(InvalidFieldError) as caught:
        from_texts({"max_tokens": "many"}, OPTIONS)
    assert caught.value.field == "max_tokens"
