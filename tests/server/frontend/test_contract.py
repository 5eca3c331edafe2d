"""One contract for every wire: a good value arrives, a bad one is rejected by the client's name."""

import math
from pathlib import Path
from typing import Any

import pytest

from quill.server.errors import InvalidFieldError, status_name
from quill.server.fields import GENERATE
from tests.server.frontend.wires import WIRES, name_on, read
from tests.server.running import CONTEXT

TEXTS = Path(__file__).with_name("error_texts.txt")
# option, a good value, bad values; options that a value goes with.
CONTRACT: list[tuple[str, Any, list[Any], dict[str, Any]]] = [
    ("max_new_tokens", 5, [0, -1, CONTEXT + 1, 2**31], {}),
    ("min_new_tokens", 2, [-1, CONTEXT + 1, 6], {"max_new_tokens": 5}),
    ("temperature", 0.5, [-0.1], {}),
    ("top_p", 0.5, [0.0, 2.0, -1.0], {}),
    ("top_k", 7, [-2], {}),
    ("min_p", 0.25, [-0.1, 1.1], {}),
    ("repetition_penalty", 1.5, [0.0, -1.0, 101.0], {}),
    ("frequency_penalty", -1.5, [2.1, -2.1], {}),
    ("presence_penalty", 1.5, [3.0], {}),
    ("logit_bias", {5: -3.0}, [{257: 1.0}, {5: 101.0}, dict.fromkeys(range(1025), 1.0)], {}),
    ("seed", 7, [], {}),
    ("stop", ["end"], [["x"] * 17, [""], ["é" * 129]], {}),
    ("stop_token_ids", [7], [[257], [7] * 65], {}),
    ("ignore_eos", True, [], {}),
    ("num_sequences", 2, [0, -1, 5], {}),
    ("logprobs", 3, [-1, 21], {}),
    ("prompt_logprobs", 3, [-1, 21], {}),
    ("priority", 3, [-11, 11], {}),
    ("num_beams", 2, [0, -1, 5], {}),
    ("length_penalty", 2.0, [-10.5, 11.0], {"num_beams": 2}),
    ("length_penalty", 2.0, [2.0], {}),
    ("early_stopping", "never", ["never"], {}),
    ("temperature", 0, [0.5], {"num_beams": 2}),
    ("stop", [], [["end"]], {"num_beams": 2}),
]
GOOD = [row for row in CONTRACT if row[0] not in ("length_penalty", "early_stopping") or row[3]]
BAD = [(option, value, beside) for option, _, bad, beside in CONTRACT for value in bad]


def test_the_contract_has_every_option() -> None:
    assert {row[0] for row in CONTRACT} == {*GENERATE} - {"echo"}


def _of_request(option: str, parsed: Any) -> Any:
    request = parsed.request
    own = {"stop_token_ids": "stop_ids", "ignore_eos": "eos_ids"}.get(option, option)
    for place in (parsed, request, request.sampling, request.beams):
        if hasattr(place, own):
            return getattr(place, own)
    raise AssertionError(option)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("option", "good", "bad", "beside"), GOOD, ids=lambda row: str(row)[:24])
def test_a_good_value_arrives(
    wire: str, option: str, good: Any, bad: list[Any], beside: dict[str, Any]
) -> None:
    found = _of_request(option, read(wire, {**beside, option: good}))
    if option == "temperature" and beside:
        return  # beam search has none
    expected = {"stop": tuple, "stop_token_ids": frozenset}.get(option, lambda each: each)(good)
    assert found == (frozenset() if option == "ignore_eos" else expected)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("option", "bad", "beside"), BAD, ids=lambda row: str(row)[:24])
def test_a_bad_value_is_rejected_by_the_name_that_the_client_knows(
    wire: str, option: str, bad: Any, beside: dict[str, Any]
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read(wire, {**beside, option: bad})
    assert caught.value.field == name_on(wire, option)
    assert status_name(caught.value) == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "option", [name for name, field in GENERATE.items() if field.type == "number"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_only_grpc_can_send_are_rejected(option: str, value: float) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read("grpc", {option: value, "num_beams": 2 if option == "length_penalty" else 1})
    assert caught.value.field == option


@pytest.mark.parametrize("wire", ["http", "kserve"])
@pytest.mark.parametrize("option", [n for n, f in GENERATE.items() if f.type != "choice"])
def test_a_value_of_another_type_is_rejected_by_name(wire: str, option: str) -> None:
    if option == "echo":
        return
    wrong: Any = [[]] if GENERATE[option].type in ("strings", "integers") else []
    if option == "priority":
        return  # `wires` negates it
    with pytest.raises(InvalidFieldError) as caught:
        read(wire, {option: wrong})
    assert caught.value.field == name_on(wire, option)


def error_texts() -> str:
    """Each error of the contract, as a client of gRPC and one of HTTP read it."""
    lines = []
    for option, bad, beside in BAD:
        for wire in ("grpc", "http"):
            try:
                read(wire, {**beside, option: bad})
            except InvalidFieldError as error:
                lines.append(f"{wire}: {error}")
    return "\n".join(lines) + "\n"


def test_errors_say_what_is_allowed() -> None:
    """After a change of wording: TEXTS.write_text(error_texts())."""
    assert error_texts() == TEXTS.read_text(encoding="utf-8")
