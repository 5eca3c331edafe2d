"""Reads values of imported files, and checks their types.

Knows: names, types, defaults. Does not know: files, or what any name means.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from quill.model.errors import CheckpointError

T = TypeVar("T")


class TypedValues:
    """The metadata of a GGUF file, or one object of a JSON file. A null counts as absent."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values = values
        self._origin = origin

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def get(self, name: str) -> object:
        """The value as it came, None if it is absent."""
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "text")
        return value

    def texts(self, name: str) -> list[str]:
        return self._list(name, str, "a list of texts")

    def integers(self, name: str) -> list[int]:
        return self._list(name, int, "a list of whole numbers")

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._value(name, None)
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return value

    def numbers(self, name: str) -> dict[str, float | int]:
        """An object whose every value is a number."""
        value = self.mapping(name)
        if not all(type(number) in (int, float) for number in value.values()):
            raise self._wrong(name, value, "an object of numbers")
        return value

    def _list(self, name: str, kind: type[T], expected: str) -> list[T]:
        value = self._value(name, None)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self._wrong(name, value, expected)
        return value

    def _value(self, name: str, default: object) -> object:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self._origin} doesn't say {name!r}, which Quill needs")
        return default

    def _wrong(self, name: str, value: object, expected: str) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:60] + "…"
        return CheckpointError(f"{self._origin} gives {name!r} as {shown}; it must be {expected}")
