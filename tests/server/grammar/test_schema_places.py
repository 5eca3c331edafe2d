"""A refusal says where in a schema the mistake is."""

import json
import time
from typing import Any

import pytest

from quill.server.errors import InvalidFieldError
from quill.server.grammar.compiler import Form
from quill.server.grammar.schema_places import MAX_S, place_of, schemas_within
from tests.server.running import make_grammars

WRONG = {"type": "string", "format": "poem"}
LARGE = {"type": "integer", "minimum": 10**30}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (WRONG, ""),
        ({"properties": {"a": {}, "b": WRONG}}, ", at /properties/b"),
        ({"properties": {"a": {"items": {"properties": {"b": WRONG}}}}}, "/a/items/properties/b"),
        ({"properties": {"a/b~c": WRONG}}, ", at /properties/a~1b~0c"),
        ({"anyOf": [{"type": "null"}, {"prefixItems": [{}, WRONG]}]}, "/anyOf/1/prefixItems/1"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"items": WRONG}}}, ", at /$defs/x/items"),
        ({"properties": {"a": {"$ref": "#/$defs/missing"}}}, "exist, at /properties/a"),
        ({"additionalProperties": LARGE}, ", at /additionalProperties"),
        ({"patternProperties": {"^a": WRONG}}, ", at /patternProperties/^a"),
        ({"properties": {"x" * 200: WRONG}}, "Unknown format: poem"),
    ],
)
def test_refusal_ends_with_a_pointer_to_the_mistake(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        make_grammars().compile_now(Form("json_schema", json.dumps(schema)))
    assert caught.value.reason.endswith(place or "Unknown format: poem")


def test_what_is_no_schema_is_no_place() -> None:
    schema = {"const": {"items": WRONG}, "enum": [WRONG], "items": True, "properties": {"a": 1}}
    assert not list(schemas_within(schema))


def test_nobody_looks_for_long() -> None:
    def slow(schema: dict[str, Any]) -> str:
        began_s = time.thread_time()
        while time.thread_time() - began_s < MAX_S / 4:
            pass
        return "same"

    schema: dict[str, Any] = {}
    for _ in range(60):
        schema = {"items": schema}
    assert 1 <= place_of("same", schema, slow).count("/items") <= 5
