"""Makes the form of an answer that calls tools.

Knows: llguidance's notation, how calls are written. Does not know: protobuf, what tools are for.

Arguments keep to their tool's schema, as an answer does to one. Where the model may speak, nothing
is kept to before it writes what begins its calls; from there on all is.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quill.server.errors import InvalidFieldError
from quill.server.grammar.compiler import Form, schema_source
from quill.server.tools import CallForm, Tool

# A text, in which special tokens are numbers.
Split = Callable[[str], Sequence[str | int]]
_TEXT = r"/(.|\n)*/"
_WORDS = r"/([^{](.|\n)*)?/"  # a text that is no call
# With any of these it isn't clear which properties an object has.
_OPEN_ENDED = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")


def calls_form(
    tools: Mapping[str, Tool], form: CallForm, split: Split, *, may_speak: bool, several: bool
) -> Form:
    """`tools`: those that may be called, by the names of their fields."""
    lines = [*_start(form, split, may_speak, several), f"call: {' | '.join(_rules(len(tools)))}"]
    for rule, tool in zip(_rules(len(tools)), tools.values(), strict=True):
        lines.append(f'{rule}: {_quoted(form.head(tool.name))} @{rule}_arguments "}}"')
    schemas = {field: _schema(tool) for field, tool in tools.items()}
    grammars: list[Any] = [{"lark_grammar": "\n".join(lines)}]
    for rule, (field, schema) in zip(_rules(len(tools)), schemas.items(), strict=True):
        grammars.append({**_grammar(schema, field), "name": f"{rule}_arguments"})
    return Form(
        "tools", json.dumps({"grammars": grammars}, ensure_ascii=False), tuple(schemas.items())
    )


def _rules(number: int) -> list[str]:
    return [f"call_{index}" for index in range(number)]


def _start(form: CallForm, split: Split, may_speak: bool, several: bool) -> list[str]:
    between = "" if form.between is None or not several else _sequence(form.between, split)
    more = f"({between} call)*" if between else ""
    calls = f"{_sequence(form.before, split)} call {more} {_sequence(form.after, split)}"
    marker = _sequence(form.marker, split)
    if not may_speak:
        return [f"start: {marker} {calls}"]
    if not marker:
        return [f"start: WORDS | {calls}", f"WORDS: {_WORDS}"]
    if isinstance(split(form.marker)[0], int):  # no text has it
        return [f"start: TEXT | TEXT {marker} {calls}", f"TEXT: {_TEXT}"]
    return [f"start: TEXT | begun {calls}", f"begun[lazy]: TEXT {marker}", f"TEXT: {_TEXT}"]


def _sequence(text: str, split: Split) -> str:
    parts = [part for part in split(text) if part != ""]
    return " ".join(f"<[{part}]>" if isinstance(part, int) else _quoted(part) for part in parts)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _grammar(schema: str, field: str) -> Any:
    try:
        return json.loads(schema_source(schema))["grammars"][0]
    except ValueError as error:
        raise InvalidFieldError(field, f"can't be kept to: {error}") from None


def _schema(tool: Tool) -> str:
    """Whoever calls a function gives it what it asks for, and nothing else."""
    if tool.parameters is None:
        return '{"type": "object", "additionalProperties": false}'
    schema = {"type": "object", **tool.parameters}
    if "properties" in schema and not any(name in schema for name in _OPEN_ENDED):
        schema["additionalProperties"] = False
    return json.dumps(schema, ensure_ascii=False)
