"""A contender that computes nothing: its answers are what it was told at its start.

    python -m tests.loadtest.reciting_contender NAME SECONDS …

Each task takes the next of the given seconds; "fail" fails, "die" ends the process.
"""

import itertools
import os
import sys
from collections.abc import Sequence

from quill.loadtest.bench.contenders.protocol import About, Score, serve


class Reciting:
    def __init__(self, name: str, answers: Sequence[str]) -> None:
        self.about = About(name, "none", "1", 7)
        self._answers = itertools.cycle(answers)

    def prefill(self, ids: Sequence[int]) -> float:
        return self._next()

    def decode(self, ids: Sequence[int], num_rows: int, num_steps: int) -> float:
        return self._next()

    def score(self, passages: Sequence[Sequence[int]]) -> Score:
        num_tokens = sum(len(ids) - 1 for ids in passages)
        return Score(2.0 * num_tokens, num_tokens)

    def _next(self) -> float:
        answer = next(self._answers)
        if answer == "fail":
            raise ValueError("as I was told")
        if answer == "die":
            os._exit(1)
        print("a library that talks")  # must not reach the pipe
        return float(answer)


if __name__ == "__main__":
    serve(Reciting(sys.argv[1], sys.argv[2:]))
