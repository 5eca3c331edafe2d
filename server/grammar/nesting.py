"""Refuses forms whose parts lie too deep within one another.

Knows: what of schemas and grammars is within what. Does not know: what it means, requests.

The library calls itself for each part within another, by reference, too, and when its stack is
full the process ends. With 8 MB that took 1,850 levels of a schema, or 2,500 rules, each of which
names the next.
"""

from collections.abc import Iterator
from typing import Any

from quill.server.grammar.schema_places import target_of

MAX_DEPTH = 64  # objects and lists of a schema within one another
MAX_LEVELS = 800  # of a schema and of all that it refers to; of a grammar rules and brackets


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
    targets = (target_of(ref, schema) for ref in {ref for ref in given if isinstance(ref, str)})
    # Where it isn't clear, it may be the whole schema: nothing is deeper.
    found_levels = (heights.get(id(schema if each is None else each), 0) for each in targets)
    num_levels = sum(found_levels) + heights[id(schema)]
    if num_levels > MAX_LEVELS:
        rule = f"{MAX_LEVELS} levels at most, of it and of all that it refers to"
        raise ValueError(f"{num_levels} levels; {rule}")


def check_rules(lark: str) -> None:
    """Of a grammar without its schemas. Raises ValueError. Each rule has a line, or a `%lark`."""
    num_rules = sum(":" in line for line in lark.splitlines()) + lark.count("%lark")
    num_parts = num_rules + lark.count("(") + lark.count("[")
    if num_parts > MAX_LEVELS:
        raise ValueError(f"{num_parts} rules and brackets; {MAX_LEVELS} at most")
