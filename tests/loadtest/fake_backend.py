"""A backend that computes nothing: its times are given on its command line.

    python -m tests.loadtest.fake_backend NAME[~KLD] SECONDS …

Each turn takes the next of the given seconds; "fail" fails, "die" ends the process. KLD is the mean
of its logits' divergence from a reference.
"""

import itertools
import os
import sys
from collections.abc import Sequence

from quill.loadtest.bench.backends.protocol import BackendInfo, Score, serve


class FakeBackend:
    def __init__(self, name: str, answers: Sequence[str]) -> None:
        name, _, self._kld = name.partition("~")
        self.info = BackendInfo(name, "none", "1", 7_000_000)
        self._answers = itertools.cycle(answers)

    def prefill(self, ids: Sequence[int]) -> float:
        return self._next()

    def decode(self, ids: Sequence[int], num_seqs: int, num_steps: int) -> float:
        return self._next()

    def score(self, passages: Sequence[Sequence[int]], reference: str | None = None) -> Score:
        num_tokens = sum(len(ids) - 1 for ids in passages)
        kld = float(self._kld) * num_tokens if self._kld else None
        return Score(2.0 * num_tokens, num_tokens, kld)

    def _next(self) -> float:
        answer = next(self._answers)
        if answer == "fail":
            raise ValueError("as given")
        if answer == "die":
            os._exit(1)
        print("a library that prints")  # must not reach the pipe
        return float(answer)


if __name__ == "__main__":
    serve(FakeBackend(sys.argv[1], sys.argv[2:]))
