"""CTranslate2 as a backend.

    python -m quill.loadtest.bench.backends.ctranslate2 DIRECTORY KIND THREADS

Knows: its generator. Runs in the peers' virtual environment.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import ctranslate2
import numpy as np

from quill.loadtest.bench.backends.protocol import (
    BackendInfo,
    Score,
    model_arguments,
    serve,
    size_of,
)


class CTranslate2:
    """It decodes whole answers only, so the clock is read when its steps report."""

    def __init__(self, path: Path, kind: str, num_threads: int) -> None:
        self.info = BackendInfo("CTranslate2", kind, ctranslate2.__version__, size_of(path))
        self._generator = ctranslate2.Generator(
            str(path), device="cpu", compute_type=kind, inter_threads=1, intra_threads=num_threads
        )
        words = (path / "vocabulary.json").read_text(encoding="utf-8")
        self._words: list[str] = json.loads(words)

    def prefill(self, ids: Sequence[int]) -> float:
        start = time.perf_counter()
        self._generate([ids], 1, [])
        return time.perf_counter() - start

    def decode(self, ids: Sequence[int], num_seqs: int, num_steps: int) -> float:
        times: list[float] = []
        # Two steps before the clock: the first reads the prompts.
        self._generate([ids] * num_seqs, num_steps + 2, times)
        return times[(num_steps + 2) * num_seqs - 1] - times[2 * num_seqs - 1]

    def score(self, passages: Sequence[Sequence[int]]) -> Score:
        nll, num_tokens = 0.0, 0
        for ids in passages:
            output = self._generator.forward_batch([list(ids)], return_log_probs=True)
            logprobs_TV = np.array(output)[0]
            nll -= float(logprobs_TV[np.arange(len(ids) - 1), ids[1:]].astype(np.float64).sum())
            num_tokens += len(ids) - 1
        return Score(nll, num_tokens)

    def _generate(self, rows: Sequence[Sequence[int]], num: int, times: list[float]) -> None:
        def note(_: object) -> bool:
            times.append(time.perf_counter())
            return False

        self._generator.generate_batch(
            [[self._words[token] for token in ids] for ids in rows],
            max_length=num,
            min_length=num,
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=note,
        )


if __name__ == "__main__":
    serve(CTranslate2(*model_arguments(sys.argv)))
