"""Fields of a JSON object: what each may hold, and how it is described to people and programs.

Knows: JSON, kinds of values. Does not know: which fields there are, doors, protobuf.

What is checked and what is documented is the same table. `null` means unset, as clients send it.
Unknown fields are ignored: clients send ever new ones. Those that are known and would change an
answer, and that nobody here heeds, are refused by name instead of being dropped in silence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quill.server.errors import InvalidFieldError

Json = dict[str, Any]
INT64 = range(-(2**63), 2**64)  # what any field can hold


@dataclass(frozen=True)
class Kind:
    """`read(name, value)` gives the value as it is used, or refuses it."""

    schema: Json  # JSON Schema
    read: Callable[[str, Any], Any]
    from_text: Callable[[str], Any] | None = None  # for doors where all values may be strings


@dataclass(frozen=True)
class Field:
    name: str
    kind: Kind
    says: str
    into: str = ""  # the field of generation.proto that it becomes; empty if it isn't just one
    is_required: bool = False


@dataclass(frozen=True)
class Refused:
    """A field that nobody here heeds. `harmless`: values that ask for nothing."""

    name: str
    harmless: tuple[Any, ...]
    hint: str


def read_fields(
    body: Any, fields: Sequence[Field], refused: Sequence[Refused] = ()
) -> dict[str, Any]:
    """The values by name. What isn't set isn't there."""
    if not isinstance(body, dict):
        raise InvalidFieldError("body", f"is {a(body)}; it must be a JSON object")
    for each in refused:
        value = body.get(each.name)
        if value is not None and value not in each.harmless:
            raise InvalidFieldError(each.name, f"isn't supported here. {each.hint}")
    values = {}
    for field in fields:
        value = body.get(field.name)
        if value is not None:
            values[field.name] = field.kind.read(field.name, value)
        elif field.is_required:
            raise InvalidFieldError(field.name, f"is missing: give {field.says}")
    return values


def from_texts(body: Mapping[str, Any], fields: Sequence[Field]) -> Json:
    """Numbers and booleans that came as strings, as some clients write them."""
    kinds = {field.name: field.kind for field in fields}
    plain = dict(body)
    for name, value in body.items():
        kind = kinds.get(name)
        if isinstance(value, str) and kind is not None and kind.from_text is not None:
            try:
                plain[name] = kind.from_text(value)
            except ValueError:
                rule = f"it must be {kind.schema['type']}"
                raise InvalidFieldError(name, f"can't be read; {rule}") from None
    return plain


def a(value: Any) -> str:
    """What a value is, without what it says: it may be somebody's prompt."""
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "null" if value is None else "a number")


def refuse(name: str, value: Any, allowed: str) -> InvalidFieldError:
    return InvalidFieldError(name, f"is {a(value)}; it must be {allowed}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidFieldError(name, "is a number that is too large") from None


def _integer(name: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse(name, value, "a whole number")
    if value not in INT64:
        raise InvalidFieldError(name, "is a number of more than 64 bits")
    return value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refuse(name, value, "a string")
    return value


def _strings(name: str, value: Any) -> list[str]:
    each = [value] if isinstance(value, str) else value
    if not isinstance(each, list) or not all(isinstance(one, str) for one in each):
        raise refuse(name, value, "a string or a list of strings")
    return each


def _integers(name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise refuse(name, value, "a list of whole numbers")
    return [_integer(name, each) for each in value]


def _object(name: str, value: Any) -> Json:
    if not isinstance(value, dict):
        raise refuse(name, value, "an object")
    return value


def _read_boolean(text: str) -> bool:
    known = {"true": True, "false": False, "1": True, "0": False}
    if text.lower() not in known:
        raise ValueError
    return known[text.lower()]


NUMBER = Kind({"type": "number"}, _number, float)
INTEGER = Kind({"type": "integer"}, _integer, int)
BOOLEAN = Kind({"type": "boolean"}, _boolean, _read_boolean)
STRING = Kind({"type": "string"}, _string)
STRINGS = Kind(
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, _strings
)
INTEGERS = Kind({"type": "array", "items": {"type": "integer"}}, _integers)
OBJECT = Kind({"type": "object"}, _object)
