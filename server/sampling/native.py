"""Calls the library that looks through whole vocabularies: export/operators/kernels/sampling.cpp.

Knows: addresses, layouts. Does not know: rules, what a row is for.

Rows are shared out among threads, and the interpreter's lock is free meanwhile.
"""

import ctypes
import functools
import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quill.export.operators.library import library_path, operators_problem
from quill.server.errors import StartError
from quill.server.machine.resources import num_cores

# R rows of logits · I inputs · T most tops

Logits = npt.NDArray[np.float32]  # as the graph gives them
Hidden = npt.NDArray[np.float32]  # last hidden states, and vectors made of them
Scores = npt.NDArray[np.float64]  # what is computed from them, and the settings beside them
Ids = npt.NDArray[np.int64]  # tokens, and rows
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.uint32]  # a bit for each token that may be chosen, the lowest first


# As export/operators/kernels/sampling.h has them. A step packs one for each token to
# sample; numpy takes ten times as long to make an array of tuples.
_INPUT = struct.Struct("@q4dq3dq5P")
pack = _INPUT.pack  # row, temperature, top_p, min_p, u, top_k, three penalties, adjusted, mask
NOTHING_ADJUSTED = (0, 0, 0, 0, 0)  # how many tokens; addresses of ids, flags, counts, biases
_TOPS = np.dtype(
    [(name, np.int64) for name in ("row", "num_wanted", "num_found")] + [("log_total", np.float64)]
)
_IN_DOUBT, _NOT_FINITE, _NO_MEMORY = 1, 2, 3
MAX_TOP_K = 2**62  # more than any vocabulary


class Tops(NamedTuple):
    """The likeliest tokens of each row, best first, -inf never."""

    ids_RT: Ids
    logits_RT: Scores
    num_R: Counts  # how many there are
    log_totals_R: Scores  # what to subtract from logits to make log-probabilities of them
    not_finite: list[int]  # rows whose logits aren't finite: nothing is known of them


class _Threads:
    """How many share the rows of a step, for all engines of this process."""

    num = 0  # not chosen yet


def prepare(num_threads: int = 0) -> None:
    """Says at start what would stand against choosing tokens. 0: as many as there are cores."""
    _library()
    _Threads.num = num_threads


def _num_threads() -> int:
    if not _Threads.num:
        _Threads.num = num_cores()
    return _Threads.num


def sample(
    logits_RV: Logits, rows: Sequence[int], packed: Sequence[bytes]
) -> tuple[list[int], list[int], list[int]]:
    """A token for each packed input, which inputs are too close to call, and which have logits that
    aren't finite. The tokens of these mean nothing."""
    tokens_I = (ctypes.c_int64 * len(packed))()
    outcomes_I = ctypes.create_string_buffer(len(packed))
    logits_RV, shape = _described(logits_RV, rows)
    _library().QuillChoose(
        *(*shape, len(packed), b"".join(packed), _num_threads(), tokens_I, outcomes_I)
    )
    outcomes = _checked(outcomes_I.raw)
    if not any(outcomes):
        return tokens_I[:], [], []
    in_doubt = [i for i, outcome in enumerate(outcomes) if outcome == _IN_DOUBT]
    not_finite = [i for i, outcome in enumerate(outcomes) if outcome == _NOT_FINITE]
    return tokens_I[:], in_doubt, not_finite


def tops(logits_RV: Logits, rows: Sequence[int], num_tops: Sequence[int]) -> Tops:
    """As many of each of these rows as are asked for."""
    most = max(1, *num_tops)
    tops_R = np.zeros(len(rows), _TOPS)
    tops_R["row"], tops_R["num_wanted"] = rows, num_tops
    ids_RT, logits_RT = np.zeros((len(rows), most), np.int64), np.zeros((len(rows), most))
    outcomes_R = np.zeros(len(rows), np.uint8)
    logits_RV, shape = _described(logits_RV, rows)
    _library().QuillTops(
        *(*shape, len(rows), tops_R.ctypes.data, most, _num_threads()),
        *(ids_RT.ctypes.data, logits_RT.ctypes.data, outcomes_R.ctypes.data),
    )
    outcomes = _checked(outcomes_R.tobytes())
    not_finite = [i for i, outcome in enumerate(outcomes) if outcome == _NOT_FINITE]
    return Tops(ids_RT, logits_RT, tops_R["num_found"], tops_R["log_total"], not_finite)


def _described(logits_RV: Logits, rows: Sequence[int]) -> tuple[Logits, tuple[int, int, int]]:
    """The logits, which must live on, with their address, stride and vocabulary."""
    if logits_RV.dtype != np.float32 or logits_RV.strides[1] != 4 or logits_RV.strides[0] % 4:
        logits_RV = np.ascontiguousarray(logits_RV, np.float32)
    num_rows, vocab_size = logits_RV.shape
    assert vocab_size > 0
    assert not rows or 0 <= min(rows) <= max(rows) < num_rows
    return logits_RV, (logits_RV.ctypes.data, logits_RV.strides[0] // 4, vocab_size)


def _checked(outcomes: bytes) -> bytes:
    if _NO_MEMORY in outcomes:
        raise MemoryError("choosing tokens takes more memory than there is")
    return outcomes


@functools.cache
def _library() -> Any:
    problem = operators_problem()
    if problem is not None:
        raise StartError(f"tokens can't be chosen: {problem}")
    loaded = ctypes.CDLL(os.fspath(library_path()))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.QuillChoose.argtypes = (
        *(pointer, number, number, number, pointer, number),
        *(pointer, pointer),
    )
    loaded.QuillTops.argtypes = (
        *(pointer, number, number, number, pointer, number, number),
        *(pointer, pointer, pointer),
    )
    loaded.QuillChoose.restype = loaded.QuillTops.restype = None
    return loaded
