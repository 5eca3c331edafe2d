"""Blocks become the numbers that the gguf package makes of them, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from quill.model.errors import UnsupportedError
from quill.model.importers.gguf_tensors import KEPT, Source, decode, keep
from tests.random_weights import random_rows

ROWS = np.random.default_rng(5).normal(size=(6, 256)).astype(np.float32)
DEQUANTIZED = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]


@pytest.mark.parametrize("kind", DEQUANTIZED, ids=lambda kind: kind.name)
def test_rows_become_the_numbers_of_the_gguf_package(kind: Kind) -> None:
    raw = gguf.quantize(ROWS, kind).view(np.uint8)
    raw.flags.writeable = False  # as a mapped file is
    values = decode(Source(raw, kind, "some.weight"))
    assert values.dtype == torch.float32
    assert values.numpy().tobytes() == gguf.dequantize(raw, kind).tobytes()
    assert np.abs(values.numpy() - ROWS).max() < 0.5


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.IQ4_NL], ids=lambda kind: kind.name)
def test_kinds_that_only_the_gguf_package_knows_become_floats(kind: Kind) -> None:
    row_bytes = gguf.quant_shape_to_byte_shape((256,), kind)[0]
    raw = np.random.default_rng(7).integers(0, 60, size=(4, row_bytes), dtype=np.uint8)
    values = decode(Source(raw, kind, "some.weight"))
    assert values.numpy().tobytes() == gguf.dequantize(raw, kind).tobytes()


@pytest.mark.parametrize("kind", list(KEPT), ids=lambda kind: kind.name)
def test_kinds_that_are_kept_keep_their_bytes_and_numbers(kind: Kind) -> None:
    raw = random_rows(KEPT[kind], 3, 512).raw_Nb
    source = Source(raw, kind, "some.weight")
    assert keep([source]).kind == kind.name.lower()
    assert keep([source]).raw.numpy().tobytes() == raw.tobytes()
    assert decode(source).numpy().tobytes() == gguf.dequantize(raw, kind).tobytes()


def test_tensors_of_several_kinds_are_one_matrix_and_keep_their_numbers() -> None:
    kinds = [Kind.Q4_K, Kind.Q6_K, Kind.Q8_0]
    raws = [random_rows(KEPT[kind], 3, 512).raw_Nb for kind in kinds]
    sources = [Source(raw, kind, "some.weight") for raw, kind in zip(raws, kinds, strict=True)]
    assert keep(sources).kind == "q4_k:3,q6_k:3,q8_0:3"
    expected = [gguf.dequantize(source.raw_N, source.kind) for source in sources]
    assert decode(*sources).numpy().tobytes() == np.concatenate(expected).tobytes()


def test_one_tensor_in_full_precision_makes_floats_of_all_it_is_stacked_with() -> None:
    sources = [
        Source(random_rows("q6_k", 3, 256).raw_Nb, Kind.Q6_K, "some.weight"),
        Source(gguf.quantize(ROWS, Kind.F16).view(np.uint8), Kind.F16, "another.weight"),
    ]
    expected = [gguf.dequantize(source.raw_N, source.kind) for source in sources]
    assert decode(*sources).numpy().tobytes() == np.concatenate(expected).tobytes()


def test_a_kind_that_nobody_dequantizes_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"some\.weight is stored as I32"):
        decode(Source(np.zeros((1, 16), np.uint8), Kind.I32, "some.weight"))
