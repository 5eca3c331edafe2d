"""Blocks become the numbers that the gguf package makes of them, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from quill.model.errors import UnsupportedError
from quill.model.importers.gguf_tensors import decode_rows

ROWS = np.random.default_rng(5).normal(size=(6, 256)).astype(np.float32)
DEQUANTIZED = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]


@pytest.mark.parametrize("kind", DEQUANTIZED, ids=lambda kind: kind.name)
def test_rows_become_the_numbers_of_the_gguf_package(kind: Kind) -> None:
    raw = gguf.quantize(ROWS, kind).view(np.uint8)
    raw.flags.writeable = False  # as a mapped file is
    values = decode_rows(raw, kind, "some.weight").values
    assert values.dtype == torch.float32
    assert values.numpy().tobytes() == gguf.dequantize(raw, kind).tobytes()
    assert np.abs(values.numpy() - ROWS).max() < 0.5


@pytest.mark.parametrize("kind", [Kind.Q6_K, Kind.Q4_K, Kind.IQ4_NL], ids=lambda kind: kind.name)
def test_kinds_that_only_the_gguf_package_knows_are_read_too(kind: Kind) -> None:
    row_bytes = gguf.quant_shape_to_byte_shape((256,), kind)[0]
    raw = np.random.default_rng(7).integers(0, 60, size=(4, row_bytes), dtype=np.uint8)
    weight = decode_rows(raw, kind, "some.weight")
    assert weight.quantized is None
    assert weight.values.numpy().tobytes() == gguf.dequantize(raw, kind).tobytes()


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_kept_blocks_stand_for_the_same_numbers_bit_for_bit(kind: Kind) -> None:
    weight = decode_rows(gguf.quantize(ROWS, kind), kind, "some.weight")
    assert weight.quantized is not None
    assert weight.quantized.kind == kind.name.lower()
    assert weight.quantized.shape == ROWS.shape
    assert weight.quantized.dequantize().numpy().tobytes() == weight.values.numpy().tobytes()


def test_neighbouring_values_share_a_byte_and_the_first_is_in_the_low_half() -> None:
    row = (np.arange(32) % 16 - 8).astype(np.float32)[None]
    weight = decode_rows(gguf.quantize(row, Kind.Q4_0), Kind.Q4_0, "some.weight")
    assert weight.quantized is not None
    values = weight.quantized.values_NI()[0]
    assert torch.equal(weight.quantized.q[0] & 15, values[0::2])
    assert torch.equal(weight.quantized.q[0] >> 4, values[1::2])
    assert torch.equal(weight.values[0], torch.from_numpy(row[0]))


def test_a_kind_that_nobody_dequantizes_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"some\.weight is stored as I32"):
        decode_rows(np.zeros((1, 16), np.uint8), Kind.I32, "some.weight")
