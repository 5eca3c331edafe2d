"""JSON Schemas that clients send: how large they may be, and what is changed before they compile.

Knows: JSON Schema's keywords, what llguidance does with them. Does not know: grammars, requests.

The library recurses for each nested part, through references too; when its stack is full, the
process ends. With 8 MB that took 1,850 levels of a schema, or a chain of 2,500 Lark rules.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

MAX_DEPTH = 64  # nested objects and lists of a schema
MAX_LEVELS = 800  # of a schema and of all that it refers to; of a Lark grammar rules and brackets
MAX_WIDTH = 512  # entries of one object: the library's work grows with their square
MAX_PATTERNS = 64  # patternProperties of one object: with their cube
# Of multipleOf, without its point, and of all in a schema: the library makes a state for each
# remainder. 99,999 took 0.7 s and 30 MB, 999,999 10 s and 470 MB, and no limit of its own applied.
MAX_MULTIPLE = 10_000
MAX_MULTIPLES = 50_000
# `?`, `*`, `+` and `{n}` of all patterns together: the library's work and memory grow with the
# square of a chain of such parts. `\p{L}?`, 1,000 times, took 0.6 s and 83 MB.
MAX_QUANTIFIED = 1000
MAX_LOCATE_S = 0.03  # of looking for a mistake's place: its author may be an attacker
MAX_POINTER = 120
_INT64 = (-(2**63), 2**63 - 1)
# With these, the multiples of several schemas count together, as their least common multiple.
_MERGING = ("allOf", "anyOf", "oneOf", "$ref")
_SHARED = ("$defs", "definitions")  # what any schema may refer to
_BY_NAME = (*_SHARED, "properties", "patternProperties", "dependentSchemas")
_LISTS = ("prefixItems", "items", "allOf", "anyOf", "oneOf")
_ONE = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames"),
    *("not", "if", "then", "else"),
)
# What isn't quantified, or only looks so: escapes, classes, the head of a group, Lark's strings.
_PLAIN = re.compile(r'\\.|\[[^\[\]]*\]|\(\?|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_QUANTIFIER = re.compile(r"[?*+]+|\{\d")
_INLINE = re.compile(r"%json[ \t\r\n]*(?=\{)")  # where a Lark grammar has a schema

# What is within what.


def nested(value: Any) -> Iterator[tuple[int, Schema | list[Any]]]:
    """All objects and lists, each with its depth. A parent comes before its children."""
    waiting = [(1, value)]
    while waiting:
        depth, each = waiting.pop()
        if isinstance(each, dict | list):
            yield depth, each
            waiting += [(depth + 1, child) for child in _children(each)]


def _children(value: Schema | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def subschemas(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The direct subschemas, each with its step of a JSON pointer. What looks like a schema within
    constants and examples is none."""
    for keyword in _BY_NAME:
        named = schema.get(keyword)
        for name, each in named.items() if isinstance(named, dict) else ():
            if isinstance(each, dict):
                yield f"/{keyword}/{name.replace('~', '~0').replace('/', '~1')}", each
    for keyword in _LISTS:
        some = schema.get(keyword)
        for index, each in enumerate(some if isinstance(some, list) else ()):
            if isinstance(each, dict):
                yield f"/{keyword}/{index}", each
    for keyword in _ONE:
        if isinstance(each := schema.get(keyword), dict):
            yield f"/{keyword}", each


def all_schemas(schema: Schema) -> list[Schema]:
    """The schema, its subschemas and those that they refer to, each once."""
    found: dict[int, Schema] = {}
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if id(each) in found:
            continue
        found[id(each)] = each
        waiting += [subschema for _, subschema in subschemas(each)]
        target = _target(each.get("$ref"), schema)
        waiting += [target] if isinstance(target, dict) else []
    return list(found.values())


def _target(reference: Any, schema: Schema) -> Any:
    """What a `$ref` finds, anywhere in the schema: OpenAPI has its own under `components`. None:
    nothing, or the value is no reference."""
    found: Any = schema if isinstance(reference, str) else None
    for part in unquote(reference.partition("#")[2]).split("/")[1:] if found else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def locate(problem: str, schema: Schema, find_problem: Callable[[Schema], str | None]) -> str:
    """A JSON pointer to the innermost subschema that has the problem by itself. Empty: the whole
    schema, or the time to look is over."""
    began_s = time.thread_time()
    shared = {name: schema[name] for name in _SHARED if name in schema}
    pointer, is_further = "", True
    while is_further:
        is_further = False
        for step, each in subschemas(schema):
            if time.thread_time() - began_s > MAX_LOCATE_S or len(pointer + step) > MAX_POINTER:
                return pointer
            if find_problem({**shared, **each}) == problem:
                pointer, schema, is_further = pointer + step, each, True
                break
    return pointer


# Limits. All of these raise ValueError.


def parse_schema(text: str) -> Schema:
    """Checked against all limits."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object")
    _check(schema)
    return schema


def check_lark(lark: str) -> None:
    """A Lark grammar, and the schemas within it."""
    rest, start = "", 0
    for match in _INLINE.finditer(lark):
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, match.end())
        except RecursionError:
            raise _too_deep() from None
        except ValueError:
            continue  # Part of a string, or a mistake that the library reports.
        _check(schema)
        if start <= match.end():
            rest, start = rest + lark[start : match.end()], end
    rest += lark[start:]
    # Each rule has a line, or a `%lark`.
    num_rules = sum(":" in line for line in rest.splitlines()) + rest.count("%lark")
    num_parts = num_rules + rest.count("(") + rest.count("[")
    if num_parts > MAX_LEVELS:
        raise ValueError(f"{num_parts} rules and brackets; {MAX_LEVELS} at most")
    check_quantified(rest)


def check_quantified(*patterns: str) -> None:
    num = sum(len(_QUANTIFIER.findall(_PLAIN.sub("x", each))) for each in patterns)
    if num > MAX_QUANTIFIED:
        raise ValueError(f"{num} optional or repeated parts; {MAX_QUANTIFIED} at most")


def _too_deep() -> ValueError:
    return ValueError(f"more than {MAX_DEPTH} objects and lists within one another")


def _check(schema: Schema) -> None:
    _check_nesting(schema)
    objects = [each for _, each in nested(schema) if isinstance(each, dict)]
    for each in objects:
        _check_size(each)
        _check_numbers(each)
        _check_exclusive(each)
    _check_multiples(objects)
    check_quantified(*(pattern for each in objects for pattern in _patterns(each)))


def _patterns(schema: Schema) -> list[str]:
    pattern, names = schema.get("pattern"), schema.get("patternProperties")
    found = [pattern] if isinstance(pattern, str) else []
    return [*found, *names] if isinstance(names, dict) else found


def _check_nesting(schema: Schema) -> None:
    """References may form a chain, in which each is followed once."""
    found = list(nested(schema))
    if any(depth > MAX_DEPTH for depth, _ in found):
        raise _too_deep()
    heights: dict[int, int] = {}
    for _, each in reversed(found):
        heights[id(each)] = 1 + max((heights.get(id(one), 0) for one in _children(each)), default=0)
    given = [each.get("$ref") for _, each in found if isinstance(each, dict)]
    targets = (_target(ref, schema) for ref in {ref for ref in given if isinstance(ref, str)})
    # An unclear target may be the whole schema: nothing is deeper.
    target_levels = (heights.get(id(schema if each is None else each), 0) for each in targets)
    num_levels = sum(target_levels) + heights[id(schema)]
    if num_levels > MAX_LEVELS:
        rule = f"{MAX_LEVELS} levels at most, of it and of all that it refers to"
        raise ValueError(f"{num_levels} levels; {rule}")


def _check_size(schema: Schema) -> None:
    if len(schema) > MAX_WIDTH:
        raise ValueError(f"an object of {len(schema)} entries; {MAX_WIDTH} at most")
    patterns, least = schema.get("patternProperties"), schema.get("minProperties")
    if isinstance(patterns, dict) and len(patterns) > MAX_PATTERNS:
        raise ValueError(f"{len(patterns)} patternProperties; {MAX_PATTERNS} at most")
    is_open = bool(patterns) or schema.get("additionalProperties") is not False
    required = schema.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if isinstance(least, int | float) and is_open and least > num_required + 1:
        # The library lets one name repeat, and JSON parsers keep one of them.
        raise ValueError(f"minProperties {least} where names beside those required may be any")


def _check_numbers(schema: Schema) -> None:
    """The library reads numbers as doubles, and bounds of integers as 64 bits after that."""
    for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        bound: Any = schema.get(name)
        if type(bound) in (int, float) and _is_loosened(name, bound):
            raise ValueError(f"{name} {_short(bound)}: bounds this large aren't kept to exactly")
    for name in ("const", "enum"):
        for number in _whole_numbers(schema.get(name)):
            if not _is_exact(number):
                rule = "whole numbers this large aren't kept to exactly. Write it as a string"
                raise ValueError(f"{_short(number)} in {name}: {rule}")


def _is_exact(number: float) -> bool:
    """Where an integer is required, the library takes one beyond 64 bits for the last of them. The
    lowest is a range of nothing else: see `_is_loosened`."""
    within = _INT64[0] < number <= _INT64[1]
    return within and (type(number) is float or Decimal(repr(float(number))) == number)


def _is_loosened(name: str, bound: float) -> bool:
    """Whether the library would let through what the bound forbids, or worse."""
    read = _double(bound)
    within = min(max(read, _INT64[0]), _INT64[1])
    if name.endswith("inimum"):
        return within < bound
    # For a range of nothing but the lowest integer, the library recurses until the process dies.
    is_lowest = read <= _INT64[0]
    return is_lowest or within > bound or (name == "exclusiveMaximum" and read > bound)


def _check_exclusive(schema: Schema) -> None:
    """Between 2 and 2.5 the library has 2 itself, and -2 between -2.5 and -2."""
    for name, end, sign in (("exclusiveMinimum", "aximum", 1), ("exclusiveMaximum", "inimum", -1)):
        others = [sign * other for other in _bounds(schema, f"m{end}", f"exclusiveM{end}")]
        above = {int(other): other for other in others if other > 0 and other != int(other)}
        for bound in _bounds(schema, name):
            if sign * bound in above:
                rule = f"beside a bound of {sign * above[int(sign * bound)]} it isn't kept to"
                raise ValueError(f"{name} {bound}: {rule}")


def _bounds(schema: Schema, *names: str) -> list[float]:
    """The schema's own, and those of the cases that are merged into it."""
    found = [schema[name] for name in names if type(schema.get(name)) in (int, float)]
    for name in ("allOf", "anyOf", "oneOf"):
        cases = schema.get(name)
        for case in cases if isinstance(cases, list) else ():
            found += _bounds(case, *names) if isinstance(case, dict) else []
    return [bound for bound in found if math.isfinite(bound)]


def _check_multiples(schemas: list[Schema]) -> None:
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
    if len(set(multiples)) > 1 and any(name in each for each in schemas for name in _MERGING):
        places = max(0, *(-int(each.as_tuple().exponent) for each in multiples))
        if math.lcm(*(int(each.scaleb(places)) for each in multiples)) > MAX_MULTIPLE:
            rule = f"their least common multiple, without its point, may be {MAX_MULTIPLE} at most"
            raise ValueError(f"several multipleOf beside {', '.join(_MERGING)}; {rule}")


def _digits(number: Decimal) -> int:
    """All digits but zeros at the end: 1.25 and 12500 have 125."""
    return int("".join(map(str, number.normalize().as_tuple().digits)))


def _double(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{_short(number)} is too large") from None


def _short(number: float) -> str:
    return str(number) if abs(number) < 10**40 else "a number of more than 40 digits"


def _whole_numbers(value: Any) -> Iterator[float]:
    for _, each in nested([value]):
        for child in _children(each):
            if type(child) is int or (type(child) is float and child.is_integer()):
                yield child
