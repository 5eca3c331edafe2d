"""Quantized blocks stand for the numbers that the gguf package makes of them, bit for bit."""

from dataclasses import replace
from typing import get_args

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from quill.model.checkpoint.quantized_weight import (
    FORMATS,
    FinerRows,
    Kind,
    QuantizedWeight,
    in_order,
    pack,
    stack_rows,
)
from quill.model.errors import CheckpointError
from tests.random_weights import random_rows, random_weight

KINDS: tuple[Kind, ...] = get_args(Kind)


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("num_outputs", [1, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_become_the_numbers_of_the_gguf_package(
    kind: Kind, num_outputs: int, num_blocks: int
) -> None:
    num_inputs = num_blocks * FORMATS[kind].size
    weight = random_weight(kind, num_outputs, num_inputs)
    expected = gguf.dequantize(weight.raw.numpy(), GGMLQuantizationType[kind.upper()])
    assert weight.shape == (num_outputs, num_inputs)
    assert weight.dequantize().numpy().tobytes() == expected.tobytes()


def test_a_matrix_can_have_rows_of_several_kinds() -> None:
    parts = [random_rows("q4_k", 5, 512), random_rows("q4_k", 2, 512), random_rows("q6_k", 3, 512)]
    weight = stack_rows(parts)
    assert weight.kind == "q4_k:7,q6_k:3"
    assert weight.shape == (10, 512)
    expected = np.concatenate([stack_rows([part]).dequantize() for part in parts])
    assert weight.dequantize().numpy().tobytes() == expected.tobytes()
    again = QuantizedWeight(weight.kind, weight.raw.clone())
    assert torch.equal(again.dequantize(), weight.dequantize())


def test_parts_of_one_kind_are_one_matrix() -> None:
    parts = [random_rows("q5_0", 5, 96), random_rows("q5_0", 2, 96, seed=1)]
    assert stack_rows(parts).kind == "q5_0"
    assert stack_rows(parts).shape == (7, 96)


def test_rows_of_one_tensor_are_a_view_not_a_copy() -> None:
    rows = random_rows("q6_k", 3, 256)
    assert stack_rows([rows]).raw.numpy().ctypes.data == rows.raw_Nb.ctypes.data


def test_finer_rows_take_the_place_of_others() -> None:
    coarse, finer = random_weight("q4_0", 40, 64), random_weight("q8_0", 3, 64)
    rows_M = torch.tensor([2, 17, 39])
    both = replace(coarse, finer=FinerRows(rows_M, finer))
    expected_NI = coarse.dequantize()
    expected_NI[rows_M] = finer.dequantize()
    assert torch.equal(both.dequantize(), expected_NI)
    for rows_U in (torch.tensor([17, 3, 39, 2]), torch.arange(40), torch.arange(3, 9)):
        assert torch.equal(both.dequantize_rows(rows_U), expected_NI[rows_U])
        assert torch.equal(coarse.dequantize_rows(rows_U), coarse.dequantize()[rows_U])


def test_rows_can_be_put_in_another_order() -> None:
    weight, order = random_weight("q6_k", 4, 256), torch.tensor([2, 0, 3, 1])
    assert torch.equal(in_order(weight, order).dequantize(), weight.dequantize()[order])


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("q4_0", (2, 17)),
        ("q4_0", (2, 0)),
        ("q6_k", (2, 105)),
        ("q4_k:2,q6_k:1", (500,)),
        ("q4_k:0,q6_k:1", (210,)),
        ("q9_9", (2, 18)),
        ("q4_0:2", (2, 18)),
        ("q4_0,q4_1", (2, 18)),
    ],
)
def test_bytes_that_are_not_blocks_of_their_kind_are_an_error(
    kind: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(CheckpointError, match=r"can't be blocks of|unknown kind|no outputs"):
        QuantizedWeight(kind, torch.zeros(shape, dtype=torch.uint8))


def test_packed_integers_are_what_they_were() -> None:
    q = torch.arange(64).remainder(16).reshape(1, 64)
    scale, minimum = torch.tensor([[0.5, 2.0]]), torch.tensor([[-3.0, 1.0]])
    expected = q * scale.repeat_interleave(32, 1) + minimum.repeat_interleave(32, 1)
    assert torch.equal(pack("q4_1", q, scale, minimum).dequantize(), expected)
    expected = (q - 8) * scale.repeat_interleave(32, 1)
    assert torch.equal(pack("q4_0", q, scale).dequantize(), expected)
    wide = torch.arange(64).reshape(1, 64) * 4
    expected = (wide - 128) * scale.repeat_interleave(32, 1)
    assert torch.equal(pack("q8_0", wide, scale).dequantize(), expected)
