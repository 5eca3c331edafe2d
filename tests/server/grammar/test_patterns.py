"""A class that leaves out a character has no way around that."""

import json
import re
from typing import Any

import pytest

from quill.server.grammar.compiler import Form
from quill.server.grammar.patterns import narrow_patterns
from tests.server.running import make_grammars

TEXTS = ["", "a", '"', "\\", 'a"', "b\\", '\\"', "\n", "a\tb", "é", "[^", "]", "/", "a^"]


def _allows(schema: dict[str, Any], said: str) -> bool:
    matcher = make_grammars().compile_now(Form("json_schema", json.dumps(schema))).matcher()
    tokens = [byte + 1 for byte in said.encode()]
    return matcher.num_allowed(tokens) == len(tokens)


PATTERNS = [
    '^[^"]*$',
    r"^[^\\]+$",
    r'^[^\\/:*?"<>|]+$',
    r'^([^"a]|é)*$',
    '^[^"]{1,2}$',
    '[^"]',
    r"^\[[^\]]*$",
    r"^[\[^a]*$",
    r"^\[\^$",
    r"^\\[^a]*$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_string_has_what_its_pattern_allows(pattern: str) -> None:
    for text in TEXTS:
        said = json.dumps(text, ensure_ascii=False)
        is_allowed = bool(re.search(re.sub(r"\$$", r"\\Z", pattern), text))
        assert _allows({"type": "string", "pattern": pattern}, said) == is_allowed, text


def test_names_that_a_pattern_leaves_out_are_others() -> None:
    some = {"patternProperties": {'^[^"]*$': {"type": "null"}}}
    schema = {"type": "object", "additionalProperties": {"type": "integer"}, **some}
    for said, is_allowed in (
        ('{"a": null}', True),
        (r'{"a\"": 1}', True),
        ('{"a": 1}', False),
        (r'{"a\"": null}', False),
        (r'{"a\b": null}', False),
        (r'{"a\b": 1}', False),
    ):
        assert _allows(schema, said) == is_allowed, said


def test_what_is_no_class_stays_what_it_is() -> None:
    for schema in ({"pattern": r"\[^a"}, {"const": {"pattern": "[^a]"}}, {"pattern": "[^]]"}):
        before = json.dumps(schema)
        assert not narrow_patterns(schema)
        assert json.dumps(schema) == before
