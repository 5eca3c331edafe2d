"""Who makes the call that is being answered.

Knows: callers. Does not know: how they proved it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Caller:
    """`name` is that of an API key or a client certificate; empty if anybody may call."""

    name: str = ""
    requests_per_minute: int | None = None  # None: no limit
    max_concurrent: int | None = None
    tokens_per_minute: int | None = None
    max_prompt_tokens: int | None = None
    admin: bool = False


ANYBODY = Caller()

# Names of certificates go into the log, where a line must not be two.
_UNFIT = re.compile(r"[^\w.@,:*/+-]")
MAX_NAME = 200


def certified_caller(names: Iterable[str]) -> Caller:
    """Whom a client certificate names."""
    return Caller(name=_UNFIT.sub("_", ",".join(names))[:MAX_NAME])
