"""Writes what a client asked for in llguidance's notation.

Knows: constraints as plain data, llguidance's notation, where its reading of JSON Schema is wider
than the standard's. Does not know: protobuf, tokenizers, matchers.

Dates: the library's own have a 29th of February in every year, and a year 0. A pattern beside the
format says which days there are; the library keeps to both.

Patterns: as "\\u0061" a name passed for another than "a", which a schema may know. So that escape
is forbidden, but where a schema itself has a character that can't be written without. A class that
has all control characters, as [^"] does, the library writes as any escape at all, and quotes and
backslashes are back. So such classes lose one character, backspace, which has no escape either.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import llguidance

from quill.server.errors import InvalidFieldError
from quill.server.grammar.json_schema import (
    Schema,
    all_schemas,
    check_lark,
    check_quantified,
    nested,
    parse_schema,
)
from quill.server.request import Constraint
from quill.server.tools import ToolCallFormat

# Cuts a text at added tokens, special or not, which become ids: the library reads some of them as
# tokens only, and not as the texts that they stand for.
Split = Callable[[str], Sequence[str | int]]


class ToolSchema(NamedTuple):
    """A tool that may be called."""

    field: str  # which errors name
    name: str
    parameters: str  # a JSON Schema, as it was sent; empty: the tool takes no arguments


def tool_constraint(
    tools: Sequence[ToolSchema],
    format_: ToolCallFormat,
    split: Split,
    *,
    may_speak: bool,
    several: bool,
) -> Constraint:
    """Calls of these tools. `may_speak`: the model may also write text, before them or instead.

    `split` finds added tokens in what stands around calls: whoever compiles has no tokenizer.
    """
    calls = [(each.field, format_.head(each.name), each.parameters) for each in tools]
    start = _start(format_, split, may_speak, several)
    if may_speak and format_.unmarked and calls:
        start = _or_unmarked(start, [each.name for each in tools], format_.key)
    return Constraint("tools", json.dumps([calls, start]))


def source_of(constraint: Constraint) -> str:
    """Raises ValueError: with what is wrong."""
    kind, text = constraint.kind, constraint.text
    if kind == "regex":
        check_quantified(text)
        return str(llguidance.LLMatcher.grammar_from_regex(text))
    if kind == "lark":
        check_lark(text)
        return str(llguidance.grammar_from("grammar", text))  # llama.cpp's GBNF, too
    if kind == "choice":
        # As one lexeme: of rules with a shared prefix, 1,000 are too many.
        texts = " | ".join(json.dumps(each) for each in json.loads(text))
        return str(llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"))
    if kind == "tools":
        return _tool_source(text)
    return schema_source(parse_schema(text if kind == "json_schema" else '{"type": "object"}'))


def schema_source(schema: Schema) -> str:
    return json.dumps({"grammars": [_schema_grammar(schema, "json_schema")]})


def _schema_grammar(schema: Schema, name: str) -> dict[str, Any]:
    """Changes the schema in place."""
    add_calendar(schema)
    narrow_patterns(schema)
    # As most JSON is written that models were trained on, and no room for endless white space.
    separators = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    strict = {"lenient": False, "coerce_one_of": False}  # all of a schema counts
    options = {**separators, **strict, "json_allowed_escapes": _escapes(schema)}
    return {"name": name, "json_schema": {**schema, "x-guidance": options}}


# Dates and patterns.

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # those that calendars have
_FOURTHS = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTHS}|{_FOURTHS}00)"
_LONG = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
_SHORT = "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(0[1-9]|1[0-9]|2[0-8])"
DATE = f"({_YEAR}-({_LONG}|{_SHORT}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_PATTERNS = {"date": f"^{DATE}$", "date-time": f"^{DATE}[Tt]"}
_ESCAPES = 'nrtf\\"'
_CONTROL = re.compile("[\0-\b\v\x0e-\x1f\x7f]")  # all but those that have an escape above
_NEGATED = re.compile(r"\\.|\[\^(?!\])", re.DOTALL)  # or what only looks like a class


def add_calendar(schema: Schema) -> None:
    for each in all_schemas(schema):
        format_ = each.get("format")
        pattern = _PATTERNS.get(format_) if isinstance(format_, str) else None
        others = each.get("allOf", [])
        if pattern is not None and isinstance(others, list):
            each["allOf"] = [*others, {"pattern": pattern}]


def narrow_patterns(schema: Schema) -> None:
    for each in all_schemas(schema):
        pattern, names = each.get("pattern"), each.get("patternProperties")
        if isinstance(pattern, str):
            each["pattern"] = _narrowed(pattern)
        if isinstance(names, dict):
            each["patternProperties"] = {_narrowed(name): one for name, one in names.items()}


def _narrowed(pattern: str) -> str:
    return _NEGATED.sub(lambda found: "[^\\x08" if found[0] == "[^" else found[0], pattern)


def _escapes(schema: Schema) -> str:
    """The letters after a backslash that generated strings may have."""
    texts: list[Any] = []
    for _, each in nested(schema):
        texts += [*each, *each.values()] if isinstance(each, dict) else each
    needs_more = any(isinstance(text, str) and _CONTROL.search(text) for text in texts)
    return _ESCAPES + "bu" if needs_more else _ESCAPES


# Tool calls. Arguments follow their tool's schema. Where the model may write text, nothing is
# constrained before the marker of its calls; after the marker everything is.

_TEXT = r"/(.|\n)*/"
_LEAD = r'\s*(```json\s*)?\{\s*"name"\s*:\s*"'  # of an unmarked call, up to its name
_WORDS = r"/([^{](.|\n)*)?/"  # a text that is no call
# With any of these it isn't clear which properties an object has.
_OPEN_ENDED = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")


def tool_schemas(constraint: Constraint) -> dict[str, str]:
    """What each tool's arguments follow, by its field."""
    tools = json.loads(constraint.text)[0] if constraint.kind == "tools" else ()
    return {field: json.dumps(_arguments(field, text)) for field, _, text in tools}


def _tool_source(text: str) -> str:
    tools, start = json.loads(text)
    rules = [f"call_{index}" for index in range(len(tools))]
    lines = [*start, f"call: {' | '.join(rules)}"]
    grammars: list[Any] = []
    for rule, (field, head, parameters) in zip(rules, tools, strict=True):
        lines.append(f'{rule}: {json.dumps(head)} @{rule}_arguments "}}"')
        grammars.append(_schema_grammar(_arguments(field, parameters), f"{rule}_arguments"))
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *grammars]})


def _arguments(field: str, parameters: str) -> Schema:
    """A tool is given what it asks for, and nothing else."""
    if not parameters:
        return {"type": "object", "additionalProperties": False}
    try:
        schema = {"type": "object", **parse_schema(parameters)}
    except ValueError as error:
        raise InvalidFieldError(field, f"can't be kept to: {error}") from None
    if "properties" in schema and not any(name in schema for name in _OPEN_ENDED):
        schema["additionalProperties"] = False
    return schema


def _start(format_: ToolCallFormat, split: Split, may_speak: bool, several: bool) -> list[str]:
    between = "" if format_.between is None or not several else _sequence(format_.between, split)
    more = f"({between} call)*" if between else ""
    calls = f"{_sequence(format_.before, split)} call {more} {_sequence(format_.after, split)}"
    id = marker_id(format_, split)
    marker = json.dumps(format_.marker) if format_.marker else ""
    marker = marker if id is None else f"<[{id}]>"
    if not may_speak:
        return [f"start: {marker} {calls}"]
    if not format_.marker:
        return [f"start: WORDS | {calls}", f"WORDS: {_WORDS}"]
    if id is not None:  # no text has it
        return [f"start: TEXT | TEXT {marker} {calls}", f"TEXT: {_TEXT}"]
    return [f"start: TEXT | begun {calls}", f"begun[lazy]: TEXT {marker}", f"TEXT: {_TEXT}"]


def _or_unmarked(start: Sequence[str], names: Sequence[str], key: str) -> list[str]:
    """A text that begins as a call without the marker is that call."""
    rule, *lines = start
    calls = " | ".join(f"LEAD_{i} @call_{i}_arguments TAIL" for i in range(len(names)))
    leads = [rf'LEAD_{i}: /{_LEAD}{name}"\s*,\s*"{key}"\s*:\s*/' for i, name in enumerate(names)]
    text = rf'{_TEXT} & ~/{_LEAD}({"|".join(names)})"(.|\n)*/'
    lines = [f"TEXT: {text}" if line.startswith("TEXT:") else line for line in lines]
    return [f"{rule} | {calls}", *lines, *leads, r"TAIL: /\s*\}(\s*```)?/"]


def marker_id(format_: ToolCallFormat, split: Split) -> int | None:
    """The token that is the whole marker, if there is one."""
    parts = split(format_.marker)
    return parts[0] if len(parts) == 1 and isinstance(parts[0], int) else None


def _sequence(text: str, split: Split) -> str:
    parts = [part for part in split(text) if part != ""]
    return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)
