"""The manifest's JSON Schema, made from the dataclasses themselves.

Knows: type hints, JSON Schema. Does not know: what the entries mean (export/manifest.py).
For other programs that read bundles; Quill's own reader is export/records.py.
"""

import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from export.manifest import FORMAT_VERSION, Manifest
from export.records import has_default

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_PLAIN: dict[Any, dict[str, Any]] = {
    Any: {},
    bool: {"type": "boolean"},
    float: {"type": "number"},
    int: {"type": "integer"},
    str: {"type": "string"},
    types.NoneType: {"type": "null"},
}


def manifest_schema() -> dict[str, Any]:
    schema = _schema(Manifest)
    schema["properties"]["format_version"] = {"const": FORMAT_VERSION}
    return {"$schema": DIALECT, "title": "Quill bundle manifest", **schema}


def _schema(kind: Any) -> dict[str, Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        properties = {name: _schema(hint) for name, hint in get_type_hints(kind).items()}
        return {
            "type": "object",
            "properties": properties,
            "required": [
                field.name for field in dataclasses.fields(kind) if not has_default(field)
            ],
            "additionalProperties": False,
        }
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(each) for each in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    return dict(_PLAIN[kind])
