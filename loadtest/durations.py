"""Durations as people write them. Knows nothing else."""

import re

from quill.loadtest.errors import OptionError

_UNITS = {"ms": 1.0, "s": 1000.0, "m": 60_000.0}


def parse_duration_ms(text: str) -> float:
    """'500ms', '2s', '1.5m'."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", text.strip())
    if not found or float(found[1]) == 0:
        raise OptionError(f"{text!r} isn't a duration above 0, such as 500ms, 30s or 2m")
    return float(found[1]) * _UNITS[found[2]]
