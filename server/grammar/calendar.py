"""Lets dates in schemas keep to the calendar.

Knows: how many days months have. Does not know: grammars, requests.

llguidance's own dates have a 29th of February in every year, and a year 0. A pattern beside the
format says which days there are; the library keeps to both.
"""

from typing import Any

from quill.server.grammar.schema_places import all_schemas

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # those that calendars have
_FOURTHS = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTHS}|{_FOURTHS}00)"
_LONG = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
_SHORT = "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(0[1-9]|1[0-9]|2[0-8])"
DATE = f"({_YEAR}-({_LONG}|{_SHORT}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_PATTERNS = {"date": f"^{DATE}$", "date-time": f"^{DATE}[Tt]"}


def add_calendar(schema: dict[str, Any]) -> bool:
    """Within the schema that is given. Whether there was a date."""
    has_date = False
    for each in all_schemas(schema):
        format_ = each.get("format")
        pattern = _PATTERNS.get(format_) if isinstance(format_, str) else None
        others = each.get("allOf", [])
        if pattern is not None and isinstance(others, list):
            has_date = True
            each["allOf"] = [*others, {"pattern": pattern}]
    return has_date
