"""Says whether an answer is what its JSON schema asked for.

Knows: jsonschema. Does not know: who answered, or how.
"""

import json
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for


class Validity:
    """Of answers to one schema. Formats count where jsonschema knows them by itself: date, email,
    IP addresses, UUIDs and some more."""

    def __init__(self, schema: dict[str, Any]) -> None:
        kind = validator_for(schema, default=Draft202012Validator)
        self._validator = kind(schema, format_checker=kind.FORMAT_CHECKER)

    def problem(self, text: str) -> str:
        """What is wrong, in words; empty: nothing."""
        try:
            said = json.loads(text)
        except ValueError as error:
            return f"no JSON: {error}"
        first = next(iter(self._validator.iter_errors(said)), None)
        return "" if first is None else str(first.message)
