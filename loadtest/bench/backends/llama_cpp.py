"""llama.cpp as a backend.

    python -m quill.loadtest.bench.backends.llama_cpp MODEL.gguf KIND THREADS

Knows: llama-cpp-python's low-level batch API. Runs in the peers' virtual environment.
"""

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from quill.loadtest.bench.backends.protocol import (
    BackendInfo,
    Score,
    model_arguments,
    serve,
    size_of,
)

MAX_NUM_SEQS = 32
MAX_PROMPT = 1024  # tokens of a prompt that is read at once
SEQ_CONTEXT = 128  # of each of many sequences

Token = tuple[int, int, int, bool]  # id, position, sequence, whether its logits are needed


class Llama:
    """One context for a long prompt, one for many sequences."""

    def __init__(self, path: Path, kind: str, num_threads: int) -> None:
        self.info = BackendInfo("llama.cpp", kind, llama_cpp.__version__, size_of(path))
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._num_threads = num_threads
        self._one = self._open(1, MAX_PROMPT)
        self._many = self._open(MAX_NUM_SEQS, SEQ_CONTEXT)
        self._context = self._one
        self._batch = llama_cpp.llama_batch_init(MAX_PROMPT, 0, 1)

    def prefill(self, ids: Sequence[int]) -> float:
        self._use(self._one)
        start = time.perf_counter()
        self._run((token, i, 0, i == len(ids) - 1) for i, token in enumerate(ids))
        self._logits(1).argmax(axis=1)
        return time.perf_counter() - start

    def decode(self, ids: Sequence[int], num_seqs: int, num_steps: int) -> float:
        memory = self._use(self._one if num_seqs == 1 else self._many)
        self._run((token, i, 0, i == len(ids) - 1) for i, token in enumerate(ids))
        for seq in range(1, num_seqs):
            llama_cpp.llama_memory_seq_cp(memory, 0, seq, -1, -1)
        chosen, length = self._step([ids[-1]] * num_seqs, len(ids)), len(ids) + 1
        start = time.perf_counter()
        for position in range(length, length + num_steps):
            chosen = self._step(chosen, position)
        return time.perf_counter() - start

    def score(self, passages: Sequence[Sequence[int]]) -> Score:
        nll, num_tokens = 0.0, 0
        for ids in passages:
            self._use(self._one)
            self._run((token, i, 0, True) for i, token in enumerate(ids))
            logits_TV = self._logits(len(ids))[:-1].astype(np.float64)
            top_T = logits_TV.max(axis=1)
            log_sums_T = np.log(np.exp(logits_TV - top_T[:, None]).sum(axis=1)) + top_T
            nll += float((log_sums_T - logits_TV[np.arange(len(ids) - 1), ids[1:]]).sum())
            num_tokens += len(ids) - 1
        return Score(nll, num_tokens)

    def _open(self, num_seqs: int, seq_context: int) -> Any:
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = num_seqs * seq_context
        settings.n_batch = settings.n_ubatch = MAX_PROMPT if num_seqs == 1 else SEQ_CONTEXT
        settings.n_seq_max = num_seqs
        settings.n_threads = settings.n_threads_batch = self._num_threads
        return llama_cpp.llama_init_from_model(self._model, settings)

    def _use(self, context: Any) -> Any:
        """Selects and clears a context; returns its memory."""
        self._context = context
        memory = llama_cpp.llama_get_memory(context)
        llama_cpp.llama_memory_clear(memory, False)
        return memory

    def _step(self, ids: Sequence[int], position: int) -> list[int]:
        self._run((token, position, seq, True) for seq, token in enumerate(ids))
        chosen: list[int] = self._logits(len(ids)).argmax(axis=1).tolist()
        return chosen

    def _run(self, tokens: Iterable[Token]) -> None:
        batch = self._batch
        num = 0
        for token, position, seq, wanted in tokens:
            batch.token[num], batch.pos[num], batch.logits[num] = token, position, wanted
            batch.n_seq_id[num], batch.seq_id[num][0] = 1, seq
            num += 1
        batch.n_tokens = num
        code = llama_cpp.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode failed with code {code}")

    def _logits(self, num: int) -> npt.NDArray[np.float32]:
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(num, self._vocab_size))


if __name__ == "__main__":
    serve(Llama(*model_arguments(sys.argv)))
