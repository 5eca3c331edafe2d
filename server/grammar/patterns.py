"""Lets strings be written in one way, and patterns leave out what they say.

Knows: how patterns write classes, JSON's escapes. Does not know: grammars, requests.

As "\\u0061" a name passed for another than "a", which a schema may know. So there is no such
escape, but where a schema itself has a character that can't be written without.

A class that has all control characters, as [^"] does, llguidance writes as any escape at all, and
quotes and backslashes are back. So such classes lose one character, backspace, which has no escape
either.
"""

import re
from typing import Any

from quill.server.grammar.nesting import inside
from quill.server.grammar.schema_places import all_schemas

_ESCAPES = 'nrtf\\"'
_CONTROL = re.compile("[\0-\b\v\x0e-\x1f\x7f]")  # all but those that have an escape above
_NEGATED = re.compile(r"\\.|\[\^(?!\])", re.DOTALL)  # or what only looks like one


def escapes(schema: dict[str, Any]) -> str:
    """The letters after a backslash that answers may have."""
    texts: list[Any] = []
    for _, each in inside(schema):
        texts += [*each, *each.values()] if isinstance(each, dict) else each
    needs_more = any(isinstance(text, str) and _CONTROL.search(text) for text in texts)
    return _ESCAPES + "bu" if needs_more else _ESCAPES


def narrow_patterns(schema: dict[str, Any]) -> bool:
    """Within the schema that is given. Whether one was changed."""
    has_changed = False
    for each in all_schemas(schema):
        pattern, names = each.get("pattern"), each.get("patternProperties")
        if isinstance(pattern, str):
            each["pattern"] = _narrowed(pattern)
            has_changed |= each["pattern"] != pattern
        if isinstance(names, dict):
            each["patternProperties"] = {_narrowed(name): one for name, one in names.items()}
            has_changed |= each["patternProperties"].keys() != names.keys()
    return has_changed


def _narrowed(pattern: str) -> str:
    return _NEGATED.sub(lambda found: "[^\\x08" if found[0] == "[^" else found[0], pattern)
