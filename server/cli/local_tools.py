"""The functions of a user's Python file as tools of a model: `quill chat --tools FILE.py`.

Knows: Python's functions, their type hints as JSON Schema. Does not know: conversations, servers.

Importing the file runs it, as Python does. The caller asks the user before it runs a function.
"""

import importlib.util
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quill.server.errors import ServerError

Schema = dict[str, Any]
_SIMPLE: dict[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    dict: {"type": "object"},
}
_KNOWN = "str, int, float, bool, None, list, dict, Literal, and unions of these"
_MODULE = "quill_tools"


@dataclass(frozen=True)
class LocalTool:
    """A public function, with its docstring and its parameters as a model sees them."""

    function: Callable[..., Any]
    parameters: Schema

    @property
    def json(self) -> Mapping[str, Any]:
        description = inspect.getdoc(self.function) or ""
        name = self.function.__name__
        return {"name": name, "description": description, "parameters": self.parameters}

    def run(self, arguments: str) -> str:
        """The result for the model to read; also an error is one."""
        try:
            result = self.function(**json.loads(arguments))
            return result if isinstance(result, str) else json.dumps(result, default=str)
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # and the chat goes on
            return f"{type(error).__name__}: {error}"


def load_tools(path: str) -> dict[str, LocalTool]:
    module = _import(Path(path))
    functions = [
        each
        for name, each in vars(module).items()
        if inspect.isfunction(each) and each.__module__ == _MODULE and not name.startswith("_")
        if each.__name__.isidentifier()  # a lambda's isn't
    ]
    if not functions:
        raise ServerError(f"{path} has no public function for the model to call")
    return {each.__name__: LocalTool(each, _parameters(each)) for each in functions}


def _import(path: Path) -> types.ModuleType:
    if path.suffix != ".py" or not path.is_file():
        raise ServerError(f"{path} isn't a Python file: give one that ends in .py")
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # where dataclasses look their types up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ServerError(f"{path} can't be imported: {reason}") from error
    return module


def _parameters(function: Callable[..., Any]) -> Schema:
    where = f"{function.__name__}()"
    if inspect.iscoroutinefunction(function):
        raise ServerError(f"{where} is async, and tools must not be")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # whatever stands there is evaluated
        raise ServerError(f"{where} has a type hint that fails: {error}") from error
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ServerError(f"{where} has the parameter {parameter}; each needs its own name")
        if name not in hints:
            raise ServerError(f"{where} has no type hint for {name}: write {name}: str")
        properties[name] = _schema(hints[name], f"{name} of {where}")
        if parameter.default is parameter.empty:
            required.append(name)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _schema(hint: Any, where: str) -> Schema:
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if not inner and (kind or hint) in _SIMPLE:  # typing.List is a list
        return _SIMPLE[kind or hint]
    if kind is Literal and all(isinstance(each, str | int | None) for each in inner):
        return {"enum": list(inner)}
    if kind in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(each, where) for each in inner]}
    if kind is list:
        return {"type": "array", "items": _schema(inner[0], where)}
    if kind is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema(inner[1], where)}
    raise ServerError(f"{where} has the type {hint}; known are {_KNOWN}")
