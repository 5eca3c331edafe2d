"""Tool calls against BFCL's possible answers, by its rules."""

import json
from typing import Any

import pytest

from quill.model.benchmarks.bfcl import ToolCall, are_right, are_valid, make_tool

AREA = {
    "name": "geometry.area",
    "description": "The area of a shape",
    "parameters": {
        "type": "dict",
        "properties": {
            "base": {"type": "integer", "description": "x"},
            "height": {"type": "float", "optional": True},
            "unit": {"type": "string", "default": "m"},
            "points": {"type": "array", "items": {"type": "float"}},
            "style": {"type": "dict", "properties": {"color": {"type": "string"}}},
        },
        "required": ["base", "height"],
    },
}
ANSWER = {
    "geometry.area": {
        "base": [10],
        "height": [5.0],
        "unit": ["square meters", ""],
        "points": [[1.0, 2.0], ""],
        "style": [{"color": ["red", "blue"]}, ""],
    }
}


def call(name: str = "geometry_area", **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments))


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({"base": 10, "height": 5.0}, True),
        ({"base": 10, "height": 5}, True),  # an int for a float
        ({"base": 10.0, "height": 5}, False),  # but not the reverse
        ({"base": "10", "height": 5}, False),
        ({"base": 10}, False),
        ({"base": 10, "height": 5, "depth": 1}, False),
        ({"base": 10, "height": 5, "unit": "Square-Meters"}, True),
        ({"base": 10, "height": 5, "unit": "feet"}, False),
        ({"base": 10, "height": 5, "points": [1.0, 2.0]}, True),
        ({"base": 10, "height": 5, "points": [2.0, 1.0]}, False),
        ({"base": 10, "height": 5, "style": {"color": "BLUE"}}, True),
        ({"base": 10, "height": 5, "style": {"color": "green"}}, False),
        ({"base": 10, "height": 5, "style": {}}, False),
    ],
)
def test_arguments_are_compared_by_bfcls_rules(arguments: dict[str, Any], is_right: bool) -> None:
    assert are_right([call(**arguments)], [AREA], [ANSWER]) == is_right


def test_names_and_numbers_of_calls_count() -> None:
    right = call(base=10, height=5)
    assert not are_right([], [AREA], [ANSWER])
    assert not are_right([right, right], [AREA], [ANSWER])
    assert not are_right([call("area", base=10, height=5)], [AREA], [ANSWER])
    assert not are_right([ToolCall("geometry_area", '{"base": 10')], [AREA], [ANSWER])


def test_parallel_calls_are_found_in_any_order_once_each() -> None:
    other = {"geometry.area": {"base": [1], "height": [2]}}
    first, second = call(base=10, height=5), call(base=1, height=2)
    assert are_right([second, first], [AREA], [ANSWER, other])
    assert not are_right([first, first], [AREA], [ANSWER, other])


def test_a_tool_has_a_json_schema_and_a_name_that_openai_allows() -> None:
    tool = make_tool(AREA)
    assert tool["name"] == "geometry_area"
    assert tool["parameters"]["type"] == "object"
    properties = tool["parameters"]["properties"]
    assert properties["height"] == {"type": "number"}
    assert properties["points"] == {"type": "array", "items": {"type": "number"}}
    assert properties["style"]["type"] == "object"


def test_valid_calls_follow_the_schema_whatever_their_values() -> None:
    assert are_valid([call(base=3, height=0.5)], [AREA])
    assert not are_valid([call(base="3", height=0.5)], [AREA])
    assert not are_valid([call(base=3)], [AREA])
    assert not are_valid([call("other", base=3, height=1)], [AREA])
    assert not are_valid([ToolCall("geometry_area", "{")], [AREA])
    assert not are_valid([], [AREA])
