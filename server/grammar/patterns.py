"""Lets patterns in schemas leave out what they say.

Knows: how patterns write classes. Does not know: grammars, requests.

A class that has all control characters, as [^"] does, llguidance writes as any escape at all, and
quotes and backslashes are back. So such classes lose one character, backspace, which no answer has:
server/grammar/compiler.py allows no escape for it.
"""

import re
from typing import Any

from quill.server.grammar.nesting import subschemas

_NEGATED = re.compile(r"\\.|\[\^(?!\])", re.DOTALL)  # or what only looks like one


def narrow_patterns(schema: dict[str, Any]) -> bool:
    """Within the schema that is given. Whether one was changed."""
    has_changed = False
    for each in list(subschemas(schema)):
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
