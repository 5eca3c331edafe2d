"""How a run gets on, in one line that is written over, or in some lines where it can't be.

Knows: terminals. Does not know: what is counted.
"""

import sys
import time
from typing import Any

_PLAIN_EVERY_S = 5.0


class Line:
    """On a terminal one line that changes; elsewhere a line every five seconds."""

    def __init__(self) -> None:
        self._on_terminal = sys.stdout.isatty()
        self._said_s = time.monotonic()
        self._text = ""
        self._is_said = True

    def show(self, text: str) -> None:
        self._text, self._is_said = text, False
        if self._on_terminal:
            print(f"\r\x1b[2K{text}", end="", flush=True)
        elif time.monotonic() - self._said_s >= _PLAIN_EVERY_S:
            self._say()

    def end(self) -> None:
        """The last word stays."""
        if self._on_terminal and self._text:
            print(flush=True)
        elif not self._is_said:
            self._say()

    def _say(self) -> None:
        print(self._text, flush=True)
        self._said_s, self._is_said = time.monotonic(), True


def describe(told: dict[str, Any]) -> str:
    """What the locustfile prints once a second."""
    elapsed_s = max(told["elapsed_s"], 1e-9)
    running = "" if told["running"] is None else f"  {told['running']} in flight"
    return (
        f"{elapsed_s:5.0f} s  {told['users']} users{running}  {told['requests']:,} requests  "
        f"{told['tokens'] / elapsed_s:,.0f} tokens/s  {told['errors']:,} errors"
    )
