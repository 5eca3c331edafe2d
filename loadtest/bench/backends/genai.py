"""onnxruntime-genai as a backend.

    python -m quill.loadtest.bench.backends.genai DIRECTORY KIND THREADS

Knows: its generator. Runs in the peers' virtual environment.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai

from quill.loadtest.bench.backends.protocol import (
    BackendInfo,
    Logits,
    Score,
    model_arguments,
    score_passages,
    serve,
    size_of,
)


class GenAI:
    """One generator for each batch: sequences can't join or leave."""

    def __init__(self, path: Path, kind: str, num_threads: int) -> None:
        version = onnxruntime_genai.__version__
        self.info = BackendInfo("onnxruntime-genai", kind, version, size_of(path))
        config = onnxruntime_genai.Config(str(path))
        options = f'{{"intra_op_num_threads": {num_threads}}}'
        config.overlay(f'{{"model": {{"decoder": {{"session_options": {options}}}}}}}')
        self._model = onnxruntime_genai.Model(config)

    def prefill(self, ids: Sequence[int]) -> float:
        generator = self._generator(1, len(ids) + 8)
        start = time.perf_counter()
        generator.append_tokens(np.array([ids], np.int32))
        generator.generate_next_token()
        return time.perf_counter() - start

    def decode(self, ids: Sequence[int], num_seqs: int, num_steps: int) -> float:
        generator = self._generator(num_seqs, len(ids) + num_steps + 2)
        generator.append_tokens(np.array([ids] * num_seqs, np.int32))
        generator.generate_next_token()
        generator.generate_next_token()
        start = time.perf_counter()
        for _ in range(num_steps):
            generator.generate_next_token()
        return time.perf_counter() - start

    def score(self, passages: Sequence[Sequence[int]], reference: str | None = None) -> Score:
        return score_passages(passages, reference, self._logits)

    def _logits(self, ids: Sequence[int]) -> Logits:
        """Token by token: the graph computes the last position's logits only."""
        generator = self._generator(1, len(ids) + 1)
        rows = []
        for token in ids[:-1]:
            generator.append_tokens(np.array([[token]], np.int32))
            rows.append(np.asarray(generator.get_logits()).reshape(-1).astype(np.float32))
        return np.stack(rows)

    def _generator(self, num_seqs: int, max_length: int) -> Any:
        settings = onnxruntime_genai.GeneratorParams(self._model)
        settings.set_search_options(
            batch_size=num_seqs,
            max_length=max_length,
            min_length=max_length,
            do_sample=False,
        )
        return onnxruntime_genai.Generator(self._model, settings)


if __name__ == "__main__":
    serve(GenAI(*model_arguments(sys.argv)))
