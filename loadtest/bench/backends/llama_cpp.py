"""llama.cpp and ik_llama.cpp as backends.

    python -m quill.loadtest.bench.backends.llama_cpp MODEL.gguf KIND THREADS [ik] [repacked]

Knows: llama-cpp-python's low-level batch API, and what ik_llama.cpp's has instead. `repacked`:
ik_llama.cpp interleaves rows of its weights while it loads (its option -rtr).
Runs in the peers' virtual environment.
"""

import ctypes
import importlib
import os
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quill.loadtest.bench.backends.protocol import (
    BackendInfo,
    Score,
    model_arguments,
    score_passages,
    serve,
    size_of,
)

MAX_NUM_SEQS = 32
MAX_PROMPT = 1024  # tokens of a prompt that is read at once
SEQ_CONTEXT = 128  # of each of many sequences
INTS = (ctypes.c_int32,) * 4

Token = tuple[int, int, int, bool]  # id, position, sequence, whether its logits are needed


class LlamaCpp:
    """What isn't named alike in the two libraries."""

    name, package, module = "llama.cpp", "llama-cpp-python", "llama_cpp"

    def __init__(self) -> None:
        self.library = importlib.import_module(self.module)

    def clear(self, context: Any) -> None:
        self.library.llama_memory_clear(self.library.llama_get_memory(context), False)

    def copy(self, context: Any, target: int) -> None:
        """Sequence 0 becomes another one, too."""
        memory = self.library.llama_get_memory(context)
        self.library.llama_memory_seq_cp(memory, 0, target, -1, -1)

    def logits(self, context: Any) -> Any:
        return self.library.llama_get_logits(context)


class IkLlamaCpp(LlamaCpp):
    """Its package declares few of its library's functions, and its wheel's library has no AVX-512:
    $IK_LLAMA_CPP_LIB_PATH names another one, by default that of `make peers`."""

    name, package = "ik_llama.cpp", "ik-llama-cpp-python"
    module = "ik_llama_cpp._ctypes_api"

    def __init__(self) -> None:
        compiled = Path(sys.prefix, "ik_llama.cpp", "libllama.so")
        os.environ.setdefault("IK_LLAMA_CPP_LIB_PATH", str(compiled))
        super().__init__()
        functions = self.library._lib
        self._copy = functions.llama_kv_cache_seq_cp
        self._copy.argtypes, self._copy.restype = (ctypes.c_void_p, *INTS), None
        self._logits = functions.llama_get_logits
        self._logits.argtypes = (ctypes.c_void_p,)
        self._logits.restype = ctypes.POINTER(ctypes.c_float)

    def clear(self, context: Any) -> None:
        self.library.llama_kv_cache_clear(context)

    def copy(self, context: Any, target: int) -> None:
        self._copy(context, 0, target, -1, -1)

    def logits(self, context: Any) -> Any:
        return self._logits(context)


class Llama:
    """One context for a long prompt, one for many sequences."""

    def __init__(
        self, path: Path, kind: str, num_threads: int, api: LlamaCpp, repacked: bool
    ) -> None:
        self.info = BackendInfo(api.name, kind, version(api.package), size_of(path))
        self._api, self._library = api, api.library
        self._library.llama_backend_init()
        settings = self._library.llama_model_default_params()
        if repacked:
            settings.repack_tensors, settings.use_mmap = True, False
        self._model = self._library.llama_model_load_from_file(str(path).encode(), settings)
        vocab = self._library.llama_model_get_vocab(self._model)
        self._vocab_size = self._library.llama_vocab_n_tokens(vocab)
        self._num_threads = num_threads
        self._one = self._open(1, MAX_PROMPT)
        self._many = self._open(MAX_NUM_SEQS, SEQ_CONTEXT)
        self._context = self._one
        self._batch = self._library.llama_batch_init(MAX_PROMPT, 0, 1)

    def prefill(self, ids: Sequence[int]) -> float:
        self._use(self._one)
        start = time.perf_counter()
        self._run((token, i, 0, i == len(ids) - 1) for i, token in enumerate(ids))
        self._logits(1).argmax(axis=1)
        return time.perf_counter() - start

    def decode(self, ids: Sequence[int], num_seqs: int, num_steps: int) -> float:
        self._use(self._one if num_seqs == 1 else self._many)
        self._run((token, i, 0, i == len(ids) - 1) for i, token in enumerate(ids))
        for seq in range(1, num_seqs):
            self._api.copy(self._context, seq)
        chosen, length = self._step([ids[-1]] * num_seqs, len(ids)), len(ids) + 1
        start = time.perf_counter()
        for position in range(length, length + num_steps):
            chosen = self._step(chosen, position)
        return time.perf_counter() - start

    def score(self, passages: Sequence[Sequence[int]], reference: str | None = None) -> Score:
        return score_passages(passages, reference, self._all_logits)

    def _all_logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        self._use(self._one)
        self._run((token, i, 0, True) for i, token in enumerate(ids))
        return self._logits(len(ids))

    def _open(self, num_seqs: int, seq_context: int) -> Any:
        settings = self._library.llama_context_default_params()
        settings.n_ctx = num_seqs * seq_context
        settings.n_batch = settings.n_ubatch = MAX_PROMPT if num_seqs == 1 else SEQ_CONTEXT
        settings.n_seq_max = num_seqs
        settings.n_threads = settings.n_threads_batch = self._num_threads
        return self._library.llama_init_from_model(self._model, settings)

    def _use(self, context: Any) -> None:
        """Selects and clears a context."""
        self._context = context
        self._api.clear(context)

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
        code = self._library.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode failed with code {code}")

    def _logits(self, num: int) -> npt.NDArray[np.float32]:
        pointer = self._api.logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(num, self._vocab_size))


if __name__ == "__main__":
    options = sys.argv[4:]
    api = IkLlamaCpp() if "ik" in options else LlamaCpp()
    serve(Llama(*model_arguments(sys.argv), api, "repacked" in options))
