"""What a benchmark asks of every server, and what it hears.

Knows: the load, in numbers. Does not know: any server, any wire.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Load:
    """The same for all: who comes, and for what."""

    num_users: int
    num_shared: int  # tokens that all prompts begin with
    num_new: int  # tokens of each answer
    context: int  # what one request may need at most, shared tokens included
    temperature: float  # 0 is greedy; above it nothing is cut off
    num_threads: int


class Streamed(NamedTuple):
    """One answer, as its client saw it."""

    num_tokens: int
    first_token_s: float  # since it asked


@dataclass(frozen=True)
class Serving:
    """A server that is up. `stream` asks for an answer to a prompt, and reads it as it comes."""

    name: str
    kind: str  # of weights
    pid: int | None  # None: somebody else started it
    stream: Callable[[Sequence[int]], Streamed]
