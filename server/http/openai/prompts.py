"""Texts and lists of token ids, one or several, as completions and embeddings take them.

Knows: OpenAI's four ways to write them. Does not know: what is done with them.
"""

from typing import Any

from quill.server.errors import InvalidFieldError
from quill.server.service.json_fields import Kind, refuse

MAX_PROMPTS = 2048
MAX_TOKEN_ID = 2**31 - 1
Prompt = str | list[int]


def _prompts(name: str, value: Any) -> list[Prompt]:
    """A text, token ids, or a list of either."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and not 1 <= len(value) <= MAX_PROMPTS:  # before all are looked at
        rule = f"it must have from 1 to {MAX_PROMPTS}"
        raise InvalidFieldError(name, f"has {len(value)} entries; {rule}")
    whole = isinstance(value, list) and all(
        isinstance(each, str) or _is_ids(each) for each in value
    )
    if not whole:
        raise refuse(name, value, "a string, a list of token ids, or a list of such")
    return list(value)


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(each) is int and 0 <= each <= MAX_TOKEN_ID for each in value)
    )


_STRING = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}}
PROMPTS = Kind(
    {"anyOf": [_STRING, _IDS, {"type": "array", "items": {"anyOf": [_STRING, _IDS]}}]}, _prompts
)
