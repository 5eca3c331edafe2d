"""Refuses forms whose parts lie too deep within one another.

Knows: what of schemas and grammars is within what. Does not know: what it means, requests.

The library calls itself for each part within another, by reference, too, and when its stack is
full the process ends. With 8 MB that took 1,850 levels of a schema, or 2,500 rules, each of which
names the next.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 64  # objects and lists of a schema within one another
MAX_LEVELS = 800  # of a schema and of all that it refers to; of a grammar rules and brackets
_CONSTANTS = ("const", "enum")
_BY_NAME = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def inside(value: Any) -> Iterator[tuple[int, dict[str, Any] | list[Any]]]:
    """All objects and lists, each with its depth. Whoever holds another comes before it."""
    waiting = [(1, value)]
    while waiting:
        depth, each = waiting.pop()
        if isinstance(each, dict | list):
            yield depth, each
            waiting += [(depth + 1, one) for one in _parts(each)]


def _parts(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A reference may go anywhere, so all may be a schema that is no constant."""
    waiting: list[Any] = [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        yield each
        for name, value in each.items():
            if name not in _CONSTANTS and isinstance(value, dict):
                waiting += value.values() if name in _BY_NAME else [value]
            elif name not in _CONSTANTS and isinstance(value, list):
                waiting += value


def too_deep() -> ValueError:
    return ValueError(f"more than {MAX_DEPTH} objects and lists within one another")


def check_nesting(schema: dict[str, Any]) -> None:
    """Raises ValueError. References may form a chain, in which each is followed once."""
    found = list(inside(schema))
    if any(depth > MAX_DEPTH for depth, _ in found):
        raise too_deep()
    heights: dict[int, int] = {}
    for _, each in reversed(found):
        heights[id(each)] = 1 + max((heights.get(id(one), 0) for one in _parts(each)), default=0)
    given = [each.get("$ref") for _, each in found if isinstance(each, dict)]
    targets = (_target(schema, ref) for ref in {ref for ref in given if isinstance(ref, str)})
    num_levels = sum(heights.get(id(target), 0) for target in targets) + heights[id(schema)]
    if num_levels > MAX_LEVELS:
        rule = f"{MAX_LEVELS} levels at most, of it and of all that it refers to"
        raise ValueError(f"{num_levels} levels; {rule}")


def _target(schema: Any, reference: str) -> Any:
    """What a reference finds. Where that isn't clear, the whole schema: nothing is deeper."""
    found = schema
    for name in unquote(reference.partition("#")[2]).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return schema
    return found


def check_rules(lark: str) -> None:
    """Of a grammar without its schemas. Raises ValueError. Each rule has a line, or a `%lark`."""
    num_rules = sum(":" in line for line in lark.splitlines()) + lark.count("%lark")
    num_parts = num_rules + lark.count("(") + lark.count("[")
    if num_parts > MAX_LEVELS:
        raise ValueError(f"{num_parts} rules and brackets; {MAX_LEVELS} at most")
