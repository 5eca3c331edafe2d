"""What a benchmark asks of a contender, and the loop that answers it in a process of its own.

Knows: the lines on the pipe. Does not know: any contender, what the numbers are for.

Each contender lives in a process: two versions of one runtime, or two OpenMP libraries, can't share
one. The benchmark writes a line of JSON, {"do": "prefill", "ids": […]}, and reads one back.
Between two lines a contender sleeps. A token counts when it is chosen, greedily, from its logits.
"""

import json
import os
import resource
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class About:
    """Who it is."""

    name: str
    kind: str  # of weights
    version: str
    weight_bytes: int


@dataclass(frozen=True)
class Score:
    """How well it predicts: the summed negative logarithms of so many tokens' chances."""

    nats: float
    num_tokens: int


class Contender(Protocol):
    """A model that is loaded. Whatever isn't timed is done before the clock starts."""

    about: About

    def prefill(self, ids: Sequence[int]) -> float:
        """Seconds to read a prompt and choose one token."""

    def decode(self, ids: Sequence[int], num_rows: int, num_steps: int) -> float:
        """Seconds for so many tokens more in each of so many rows that all read one prompt."""

    def score(self, passages: Sequence[Sequence[int]]) -> Score:
        """Predicts every token of each passage but the first."""


class Named(Protocol):
    """Whoever answers orders; what it can do, its methods say."""

    about: About


def serve(contender: Named) -> None:
    """Answers lines until there are no more."""
    reply, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # libraries print; only answers may be on the pipe
    print(json.dumps(asdict(contender.about)), file=reply, flush=True)
    for line in sys.stdin:
        try:
            answer = _answer(contender, json.loads(line))
        except Exception as error:  # told to the benchmark, which goes on without us
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=reply, flush=True)


def _answer(contender: Named, order: dict[str, Any]) -> dict[str, Any]:
    task = order.pop("do")
    if task == "memory":
        return {"peak_bytes": peak_bytes()}
    answer = getattr(contender, task)(**order)
    return {"seconds": answer} if isinstance(answer, float) else asdict(answer)


def peak_bytes() -> int:
    """The most memory that this process has had at a time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def size_of(path: Path) -> int:
    """Of a file, or of all files in a directory."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


MAX_NEW_TOKENS = 127


@dataclass(frozen=True)
class Translated:
    """All answers to some sources, in their order, and the time that they took together."""

    seconds: float
    answers: list[list[int]]  # without the token that ends each


class Translator(Protocol):
    about: About

    def translate(
        self, sources: Sequence[Sequence[int]], num_beams: int, num_at_once: int
    ) -> Translated:
        """So many sources at a time. One beam is greedy."""


@dataclass(frozen=True)
class Embedded:
    """The mean vectors of some texts, in their order, and the time that they took together."""

    seconds: float
    vectors: list[list[float]]


class Embedder(Protocol):
    about: About

    def embed(self, texts: Sequence[Sequence[int]]) -> Embedded:
        """Token ids, taken as they are, in the order of their arrival."""
