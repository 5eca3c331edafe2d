"""Refuses schemas that are too large, or that the library would read as something else.

Knows: JSON Schema's keywords, what llguidance makes of them. Does not know: grammars, requests.
"""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from quill.server.grammar.nesting import check_nesting, check_rules, inside, too_deep

MAX_WIDTH = 512  # entries of one object: the library's work grows with their square
MAX_PATTERNS = 64  # of names, in one object: with their cube
# Of multipleOf, without its point, and of all in a schema: the library makes a state for each rest.
# 99,999 took it 0.7 s and 30 MB, 999,999 10 s and 470 MB, and nothing of its own stopped it.
MAX_MULTIPLE = 10_000
MAX_MULTIPLES = 50_000
_MERGING = (
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
)  # both multiples then count, as their least common one
_INT64 = (-(2**63), 2**63 - 1)
_INLINE = re.compile(r"%json[ \t\r\n]*(?=\{)")  # where a Lark grammar has a schema


def check_grammar(lark: str) -> None:
    """And the schemas within it. Raises ValueError, as check_schema does."""
    rest, start = "", 0
    for place in _INLINE.finditer(lark):
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, place.end())
        except RecursionError:
            raise too_deep() from None
        except ValueError:
            continue  # Part of a text, or a mistake that the library tells of.
        _check(schema)
        if start <= place.end():
            rest, start = rest + lark[start : place.end()], end
    check_rules(rest + lark[start:])


def check_schema(schema: str) -> dict[str, Any]:
    """What it says. Raises ValueError, with what is wrong."""
    try:
        parsed = json.loads(schema)
    except RecursionError:
        raise too_deep() from None
    if not isinstance(parsed, dict):
        raise ValueError("a schema is a JSON object")
    _check(parsed)
    return parsed


def _check(schema: dict[str, Any]) -> None:
    check_nesting(schema)
    objects = [each for _, each in inside(schema) if isinstance(each, dict)]
    for each in objects:
        _check_size(each)
        _check_numbers(each)
        _check_exclusive(each)
    _check_multiples(objects)


def _check_size(schema: dict[str, Any]) -> None:
    if len(schema) > MAX_WIDTH:
        raise ValueError(f"an object of {len(schema)} entries; {MAX_WIDTH} at most")
    patterns, least = schema.get("patternProperties"), schema.get("minProperties")
    if isinstance(patterns, dict) and len(patterns) > MAX_PATTERNS:
        raise ValueError(f"{len(patterns)} patternProperties; {MAX_PATTERNS} at most")
    is_open = bool(patterns) or schema.get("additionalProperties") is not False
    required = schema.get("required")
    num_known = len(required) if isinstance(required, list) else 0
    if isinstance(least, int | float) and is_open and least > num_known + 1:
        # The library lets one name come again and again, and readers keep one of them.
        raise ValueError(f"minProperties {least} where names beside those required may be any")


def _check_numbers(schema: dict[str, Any]) -> None:
    """The library reads numbers as doubles, and bounds of integers as 64 bits after that."""
    for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        bound: Any = schema.get(name)
        if type(bound) in (int, float) and _is_loosened(name, bound):
            raise ValueError(f"{name} {_short(bound)}: bounds this large aren't kept to exactly")
    for name in ("const", "enum"):
        for number in _whole_numbers(schema.get(name)):
            if not _is_kept(number):
                rule = "whole numbers this large aren't kept to exactly. Write it as a string"
                raise ValueError(f"{_short(number)} in {name}: {rule}")


def _is_kept(number: float) -> bool:
    """Where it must be an integer, the library takes one beyond its own for the last of them. The
    lowest is a range of nothing else: see below."""
    within = _INT64[0] < number <= _INT64[1]
    return within and (type(number) is float or Decimal(repr(float(number))) == number)


def _is_loosened(name: str, bound: float) -> bool:
    """Whether what it forbids would be let through, or worse."""
    read = _double(bound)
    within = min(max(read, _INT64[0]), _INT64[1])
    if name.endswith("inimum"):
        return within < bound
    # A range of nothing but the lowest integer has the library call itself until the process dies.
    is_lowest = read <= _INT64[0]
    return is_lowest or within > bound or (name == "exclusiveMaximum" and read > bound)


def _check_exclusive(schema: dict[str, Any]) -> None:
    """Between 2 and 2.5 the library has 2 itself, and -2 between -2.5 and -2."""
    for name, end, sign in (("exclusiveMinimum", "aximum", 1), ("exclusiveMaximum", "inimum", -1)):
        others = [sign * other for other in _bounds(schema, f"m{end}", f"exclusiveM{end}")]
        above = {int(other): other for other in others if other > 0 and other != int(other)}
        for bound in _bounds(schema, name):
            if sign * bound in above:
                rule = f"beside a bound of {sign * above[int(sign * bound)]} it isn't kept to"
                raise ValueError(f"{name} {bound}: {rule}")


def _bounds(schema: dict[str, Any], *names: str) -> list[float]:
    """Its own, and those of the cases that are merged into it."""
    found = [schema[name] for name in names if type(schema.get(name)) in (int, float)]
    for name in ("allOf", "anyOf", "oneOf"):
        cases = schema.get(name)
        for case in cases if isinstance(cases, list) else ():
            found += _bounds(case, *names) if isinstance(case, dict) else []
    return [bound for bound in found if math.isfinite(bound)]


def _check_multiples(schemas: list[dict[str, Any]]) -> None:
    given: list[Any] = [schema.get("multipleOf") for schema in schemas]
    read = [_double(each) for each in given if type(each) in (int, float)]
    multiples = [Decimal(repr(each)) for each in read if math.isfinite(each)]
    for each in multiples:
        if _digits(each) > MAX_MULTIPLE:
            rule = f"without its point it may be {MAX_MULTIPLE} at most"
            raise ValueError(f"multipleOf {_short(float(each))}; {rule}")
    if sum(map(_digits, multiples)) > MAX_MULTIPLES:
        rule = f"without their points they may be {MAX_MULTIPLES} together"
        raise ValueError(f"{len(multiples)} multipleOf; {rule}")
    if any(name in schema for schema in schemas for name in _MERGING):
        _check_common(multiples)


def _check_common(multiples: list[Decimal]) -> None:
    places = max((-int(each.as_tuple().exponent) for each in multiples), default=0)
    common = math.lcm(*(int(each.scaleb(max(places, 0))) for each in multiples))
    if common > MAX_MULTIPLE and len(set(multiples)) > 1:
        rule = f"their least common multiple, without its point, may be {MAX_MULTIPLE} at most"
        raise ValueError(f"several multipleOf beside {', '.join(_MERGING)}; {rule}")


def _digits(number: Decimal) -> int:
    """All of them but zeros at the end: 1.25 and 12500 have 125."""
    digits = number.normalize().as_tuple().digits
    return int("".join(map(str, digits)))


def _double(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{_short(number)} is too large") from None


def _short(number: float) -> str:
    return str(number) if abs(number) < 10**40 else "a number of more than 40 digits"


def _whole_numbers(value: Any) -> Iterator[float]:
    for _, each in inside([value]):
        for one in each.values() if isinstance(each, dict) else each:
            if type(one) is int or (type(one) is float and one.is_integer()):
                yield one
