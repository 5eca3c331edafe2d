"""Random matrices of every quantized kind."""

import numpy as np
import torch

from quill.model.checkpoint.quantized_weight import FORMATS, Kind, QuantizedWeight, Rows, stack_rows

# Where a block's float16 numbers are: the scale, and the minimum if there is one.
NUMBERS: dict[Kind, tuple[int, ...]] = {
    **{"q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2)},
    **{"q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "mxfp4": ()},
}

SMALL: dict[Kind, int] = dict.fromkeys(("q4_k", "q5_k", "q6_k"), 400)


def random_rows(kind: Kind, num_outputs: int, num_inputs: int, seed: int = 0) -> Rows:
    """Any integers, also as a block's small scales, and numbers of a usual size."""
    numbers, of = np.random.default_rng(seed), FORMATS[kind]
    shape = (num_outputs, num_inputs // of.size, of.num_bytes)
    raw = numbers.integers(0, 256, shape, np.uint8)
    for index, start in enumerate(NUMBERS[kind]):
        low, high = (0.01, 0.11) if index == 0 or kind in ("q4_k", "q5_k") else (-0.8, 0.8)
        values = numbers.uniform(low, high, shape[:2]) / SMALL.get(kind, 1)
        raw[..., start : start + 2] = values.astype(np.float16)[..., None].view(np.uint8)
    if of.codes:
        raw[..., 0] = numbers.integers(119, 125, shape[:2], np.uint8)
    return Rows(kind, raw.reshape(num_outputs, -1))


def random_weight(kind: Kind, num_outputs: int, num_inputs: int, seed: int = 0) -> QuantizedWeight:
    return stack_rows([random_rows(kind, num_outputs, num_inputs, seed)])


def values_of(weight: QuantizedWeight) -> torch.Tensor:
    """The integers."""
    return torch.from_numpy(np.concatenate([rows.unpack().q_NI for rows in weight.rows()]))
