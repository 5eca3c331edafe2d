"""Calls the library that quantizes blocks: export/operators/kernels/quantize.cpp.

Knows: addresses, layouts. Does not know: matrices, formats. The interpreter's lock is free
meanwhile.
"""

import ctypes
import functools
import os

import torch
from torch import Tensor

from quill.export.errors import ExportError
from quill.export.operators.library import library_path, operators_problem

# N rows · B = 32 inputs of a block · R rows of factors · C inputs of a span from the block on


class _BlockJob(ctypes.Structure):
    """As export/operators/kernels/quantize.h has it."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("counts", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("factor_stride", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("middle", ctypes.c_int64),
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("minima", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("are_given", ctypes.c_int64),
        ("errors", ctypes.c_void_p),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    if problem := operators_problem():
        raise ExportError(f"weights can't be quantized here: {problem}")
    return ctypes.CDLL(os.fspath(library_path()))


def quantize_block(
    x_NB: Tensor,
    importance_B: Tensor,
    levels: tuple[int, int],
    scales: tuple[Tensor, Tensor],
    q_NB: Tensor | None = None,
    factors_RC: Tensor | None = None,
    *,
    are_given: bool = False,
) -> Tensor:
    """Finds a block's scales and minima (N,), which are parts of larger tensors, unless they are
    given; and its integers, if they are wanted. `levels`: bits, and the middle, or 0 if there are
    minima. Returns errors (N, B) that are to be passed on to the inputs after the block, if there
    are factors."""
    scale_N, minimum_N = scales
    errors_NB = torch.empty(x_NB.shape)
    assert all(each is None or each.stride(1) == 1 for each in (x_NB, q_NB, factors_RC))
    assert scale_N.stride() == minimum_N.stride()
    job = _BlockJob(
        *_rows(x_NB),
        len(x_NB),
        importance_B.data_ptr(),
        *_rows(factors_RC),
        *levels,
        *_rows(q_NB),
        *(scale_N.data_ptr(), minimum_N.data_ptr(), scale_N.stride(0)),
        are_given,
        errors_NB.data_ptr(),
    )
    _library().QuillQuantizeBlock(ctypes.byref(job))
    return errors_NB


def _rows(x: Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if x is None else (x.data_ptr(), x.stride(0))
