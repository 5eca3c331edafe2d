"""The names of an answer's calls, by which what came of them is told.

Knows: requests. Does not know: what is called.

The same request and seed give the same names, so that an answer can be asked for again; the next
turn of a conversation is another request, and has others. Nine letters and digits: Mistral's
templates take nothing else.
"""

import hashlib
import string
from functools import cached_property

from quill.server.request import Request

_CHARACTERS = string.ascii_letters + string.digits
_LENGTH = 9


class CallIds:
    """Of one request."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def of(self, sequence: int, index: int) -> str:
        digest = hashlib.sha256(self._prompt + f"{sequence} {index}".encode()).digest()
        return "".join(_CHARACTERS[byte % len(_CHARACTERS)] for byte in digest[:_LENGTH])

    @cached_property
    def _prompt(self) -> bytes:
        text = f"{self._request.seed} {self._request.prompt_ids}"
        return hashlib.sha256(text.encode()).digest()
