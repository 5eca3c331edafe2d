"""JSON: parsed without holding up the event loop, and read field by field.

Knows: JSON, types of values, how a field is described in OpenAPI. Does not know: which fields there
are, wires, models.

One table is checked and documented. `null` means unset, as clients send it. Unknown fields are
ignored: clients send ever new ones. Fields that are known, would change an answer and aren't
supported are rejected by name instead of being ignored.

The standard library's parser in C holds the interpreter's lock until it is done: half a second for
4 MiB of small lists. Its twin in Python takes a microsecond a token id, and other threads run.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.decoder import JSONArray  # type: ignore[attr-defined]  # no stub has these two
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from quill.server.errors import InvalidFieldError

Json = dict[str, Any]
INT64 = range(-(2**63), 2**64)  # what any field can hold
MAX_INLINE_BYTES = 16 * 1024  # of what is parsed at once, on the event loop
MAX_CONTAINERS = 2**16  # lists and objects: no request needs more


class JsonError(ValueError):
    """Why a text can't be read, in words that can follow its name."""


def parse_json(body: bytes) -> Any:
    try:
        text = body.decode("utf-8")
        content = (_DECODER if len(body) <= MAX_INLINE_BYTES else _LongDecoder()).decode(text)
        if b"\\ud" in body.lower():
            for each in _all_strings(content):
                each.encode("utf-8")
    except JsonError:
        raise
    except UnicodeEncodeError:
        raise JsonError("has half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError):
        raise JsonError("isn't JSON in UTF-8, or is nested too deeply") from None
    return content


def _no_constant(name: str) -> None:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


class _LongDecoder(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__(parse_constant=_no_constant, object_hook=self._object)
        self._num_containers = 0
        self.parse_array = self._array
        self.scan_once = py_make_scanner(self)

    def _array(self, *place: Any) -> Any:
        self._count()
        return JSONArray(*place)

    def _object(self, content: dict[str, Any]) -> dict[str, Any]:
        self._count()
        return content

    def _count(self) -> None:
        self._num_containers += 1
        if self._num_containers > MAX_CONTAINERS:
            rule = f"at most {MAX_CONTAINERS} are read"
            raise JsonError(f"has more lists and objects than any request; {rule}")


def _all_strings(content: Any) -> Iterator[str]:
    """Keys included."""
    left = [content]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, list):
            left.extend(each)
        elif isinstance(each, dict):
            left.extend(each)
            left.extend(each.values())


@dataclass(frozen=True)
class Kind:
    """`read(name, value)` gives the value as it is used, or raises InvalidFieldError."""

    schema: Json  # JSON Schema
    read: Callable[[str, Any], Any]
    from_text: Callable[[str], Any] | None = None  # for wires where all values may be strings


@dataclass(frozen=True)
class JsonField:
    name: str
    kind: Kind
    help: str
    option: str = ""  # the option of server/fields.py that it sets; empty if it isn't just one
    is_required: bool = False


@dataclass(frozen=True)
class Unsupported:
    """A field that is rejected, unless its value is `harmless`: asks for nothing."""

    name: str
    harmless: tuple[Any, ...]
    hint: str


def read_fields(
    body: Any, fields: Sequence[JsonField], unsupported: Sequence[Unsupported] = ()
) -> Json:
    """The values by name. What isn't set isn't there."""
    if not isinstance(body, dict):
        raise InvalidFieldError("body", f"is {type_of(body)}; it must be a JSON object")
    for each in unsupported:
        value = body.get(each.name)
        if value is not None and value not in each.harmless:
            raise InvalidFieldError(each.name, f"isn't supported here. {each.hint}")
    values = {}
    for field in fields:
        value = body.get(field.name)
        if value is not None:
            values[field.name] = field.kind.read(field.name, value)
        elif field.is_required:
            raise InvalidFieldError(field.name, f"is missing: give {field.help}")
    return values


def from_texts(body: Mapping[str, Any], fields: Sequence[JsonField]) -> Json:
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


def type_of(value: Any) -> str:
    """Without the value itself: it may be a prompt."""
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "null" if value is None else "a number")


def wrong_type(name: str, value: Any, allowed: str) -> InvalidFieldError:
    return InvalidFieldError(name, f"is {type_of(value)}; it must be {allowed}")


def read_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidFieldError(name, "is a number that is too large") from None


def read_integer(name: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, value, "a whole number")
    if value not in INT64:
        raise InvalidFieldError(name, "is a number of more than 64 bits")
    return value


def read_boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(name, value, "true or false")
    return value


def read_string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, value, "a string")
    return value


def read_strings(name: str, value: Any) -> list[str]:
    each = [value] if isinstance(value, str) else value
    if not isinstance(each, list) or not all(isinstance(one, str) for one in each):
        raise wrong_type(name, value, "a string or a list of strings")
    return each


def read_integers(name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise wrong_type(name, value, "a list of whole numbers")
    return [read_integer(name, each) for each in value]


def read_list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise wrong_type(name, value, "a list")
    return value


def read_object(name: str, value: Any) -> Json:
    if not isinstance(value, dict):
        raise wrong_type(name, value, "an object")
    return value


INTEGER = Kind({"type": "integer"}, read_integer, int)
BOOLEAN = Kind({"type": "boolean"}, read_boolean)
STRING = Kind({"type": "string"}, read_string)
INTEGERS = Kind({"type": "array", "items": {"type": "integer"}}, read_integers)
