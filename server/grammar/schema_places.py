"""Where schemas are within a schema, what they refer to, and in which of them a mistake is.

Knows: JSON Schema's keywords. Does not know: what a mistake is, grammars, requests.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

_SHARED = ("$defs", "definitions")  # what any schema may refer to
_BY_NAME = (*_SHARED, "properties", "patternProperties", "dependentSchemas")
_LISTS = ("prefixItems", "items", "allOf", "anyOf", "oneOf")
_ONE = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames"),
    *("not", "if", "then", "else"),
)
MAX_S = 0.03  # of looking for a place: whoever made the mistake may be hostile
MAX_POINTER = 120


def schemas_within(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Those directly within, each with how a JSON pointer goes on. Constants and examples may have
    all that looks like one, and are none."""
    for keyword in _BY_NAME:
        named = schema.get(keyword)
        for name, each in named.items() if isinstance(named, dict) else ():
            if isinstance(each, dict):
                yield f"/{keyword}/{name.replace('~', '~0').replace('/', '~1')}", each
    for keyword in _LISTS:
        some = schema.get(keyword)
        for place, each in enumerate(some if isinstance(some, list) else ()):
            if isinstance(each, dict):
                yield f"/{keyword}/{place}", each
    for keyword in _ONE:
        if isinstance(each := schema.get(keyword), dict):
            yield f"/{keyword}", each


def all_schemas(schema: Schema) -> list[Schema]:
    """It, those within it and those that they refer to, each once."""
    found: dict[int, Schema] = {}
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if id(each) in found:
            continue
        found[id(each)] = each
        waiting += [within for _, within in schemas_within(each)]
        target = target_of(each.get("$ref"), schema)
        waiting += [target] if isinstance(target, dict) else []
    return list(found.values())


def target_of(reference: Any, schema: Schema) -> Any:
    """What a `$ref` finds, anywhere in the schema: OpenAPI has its own under `components`. None:
    nothing, or it is no reference."""
    found: Any = schema if isinstance(reference, str) else None
    for part in unquote(reference.partition("#")[2]).split("/")[1:] if found else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def place_of(problem: str, schema: Schema, find_problem: Callable[[Schema], str | None]) -> str:
    """A JSON pointer to the innermost schema that has the problem by itself. Empty: the whole one,
    or there was no time to look further."""
    began_s = time.thread_time()
    shared = {name: schema[name] for name in _SHARED if name in schema}
    pointer, is_further = "", True
    while is_further:
        is_further = False
        for step, each in schemas_within(schema):
            if time.thread_time() - began_s > MAX_S or len(pointer + step) > MAX_POINTER:
                return pointer
            if find_problem({**shared, **each}) == problem:
                pointer, schema, is_further = pointer + step, each, True
                break
    return pointer
