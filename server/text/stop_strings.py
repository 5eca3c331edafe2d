"""Ends a text at a stop string, and shows nothing that might be the beginning of one.

Knows: text, piece by piece. Does not know: tokens, tokenizers, requests.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Released(NamedTuple):
    """`text` may be shown. `found`: it ends where a stop string began; nothing follows."""

    text: str
    found: bool


class StopStrings:
    """Holds back what may still become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._max_held = max(map(len, stops), default=1) - 1
        self._held = ""

    def add(self, text: str) -> Released:
        if not self._stops:
            return Released(text, False)
        text, self._held = self._held + text, ""
        # The one that ends first, so that it doesn't matter in which pieces the text came.
        places = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            return Released(text[: min(places)[1]], True)
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return Released(text[: len(text) - num_held], False)

    def end(self) -> str:
        """No more will come, so what was held back is plain text."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """The length of the longest end of the text that begins a stop string."""
        for length in range(min(len(text), self._max_held), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
