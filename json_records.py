"""Reads JSON into frozen dataclasses; an error names the entry that doesn't fit.

Knows: dataclasses, their type hints, JSON values. Does not know: what the records mean.
Imports only the standard library: checkpoints, runs and the server's manifests are read with it.
"""

import dataclasses
import math
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


class RecordError(ValueError):
    """A value of the wrong type, an entry missing or unknown. The message names the place."""


def from_json(kind: type[Record], value: object, where: str = "") -> Record:
    """Builds a dataclass from a JSON object."""
    record: Record = _convert(kind, value, where)
    return record


def _convert(kind: Any, value: object, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _record(kind, value, where)
    if origin in (Union, types.UnionType):
        return _one_of(arguments, value, where)
    if origin is Literal:
        return _choice(arguments, value, where)
    if origin is tuple:
        items = _checked(list, value, where)
        return tuple(_convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        entries = _checked(dict, value, where)
        return {key: _convert(arguments[1], item, _at(where, key)) for key, item in entries.items()}
    return value if kind is Any else _checked(kind, value, where)


def _record(kind: Any, value: object, where: str) -> Any:
    entries = _checked(dict, value, where)
    hints = get_type_hints(kind)
    needed = {field.name for field in dataclasses.fields(kind) if not has_default(field)}
    unknown, missing = sorted(set(entries) - set(hints)), sorted(needed - set(entries))
    if unknown:
        raise RecordError(f"{_at(where, unknown[0])} is unknown")
    if missing:
        raise RecordError(f"{_at(where, missing[0])} is missing")
    return kind(
        **{name: _convert(hints[name], entries[name], _at(where, name)) for name in entries}
    )


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Such an entry may be missing: it came after the first bundles were made."""
    return field.default is not dataclasses.MISSING


def _one_of(kinds: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    for kind in kinds[:-1]:
        try:
            return _convert(kind, value, where)
        except RecordError:
            continue
    return _convert(kinds[-1], value, where)


def _choice(choices: tuple[Any, ...], value: object, where: str) -> Any:
    if value not in choices:
        raise RecordError(f"{where} is {value!r}; it must be one of {', '.join(map(str, choices))}")
    return value


def _checked(kind: type, value: object, where: str) -> Any:
    wanted: Any = (int, float) if kind is float else kind
    fits = isinstance(value, wanted) and (kind is bool or not isinstance(value, bool))
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise RecordError(f"{where or 'the whole'} is {_shown(value)}; it must be {_NAMES[kind]}")
    return value


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_NAMES: dict[type, str] = {
    bool: "true or false",
    dict: "an object",
    float: "a finite number",
    int: "a whole number",
    list: "a list",
    str: "a text",
}
