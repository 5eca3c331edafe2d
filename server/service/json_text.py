"""JSON becomes values, without holding anybody else up where it is long.

Knows: JSON, what is text. Does not know: doors, fields.

The standard library reads JSON in C and lets no other thread go on before it is done: 4 MiB of
small lists take it half a second. Its twin in Python is slower, a microsecond a token id, and lets
others have their turns; beside computing what a long text asks for that is nothing.
"""

import json
from collections.abc import Iterator
from json.decoder import JSONArray  # type: ignore[attr-defined]  # no stub has these two
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

MAX_INLINE_BYTES = 16 * 1024  # of what is read at once, on the event loop
MAX_CONTAINERS = 2**16  # lists and objects: nothing that is asked for needs more


class JsonError(ValueError):
    """What can't be taken, in words that can follow its name."""


def parse_json(body: bytes) -> Any:
    try:
        text = body.decode("utf-8")
        content = (_DECODER if len(body) <= MAX_INLINE_BYTES else _LongDecoder()).decode(text)
        if b"\\ud" in body.lower():
            for each in _strings(content):
                each.encode("utf-8")
    except JsonError:
        raise
    except UnicodeEncodeError:
        raise JsonError("has half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError):
        raise JsonError("isn't JSON in UTF-8, or is nested too deeply") from None
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class _LongDecoder(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__(parse_constant=_refuse_constant, object_hook=self._object)
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


def _strings(content: Any) -> Iterator[str]:
    """All of them, keys included."""
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
