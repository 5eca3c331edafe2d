"""Quill's own attention: PyTorch's numbers, the same bits however it is cut, no crashes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from quill.export.verify.runner import Array, open_session
from quill.model.network.attention import Cached
from quill.model.network.positions import RotaryTables, rotary_tables
from tests.export.operators.own_kernels import KERNELS, computed_with
from tests.export.tiny import LLAMA
from tests.operators import needs_operators

pytestmark = [needs_operators, pytest.mark.portable]

NUM, NUM_KV, SIZE, CAPACITY = 6, 2, 64, 96
NAMES = ("qkv", "past_key", "past_value", "last", "longest")
CONFIG = replace(LLAMA, num_heads=NUM, num_kv_heads=NUM_KV, head_size=SIZE, context=CAPACITY)


def tables() -> RotaryTables:
    return rotary_tables(CONFIG)


def save(directory: Path, **changes: Any) -> Path:
    attributes = {"heads": NUM, "kv_heads": NUM_KV, "head_size": SIZE, "scale": SIZE**-0.5}
    rotary = changes.pop("rotary", True)
    num_tables = changes.pop("num_tables", 2)
    inputs = [*NAMES, *(("cosines", "sines")[:num_tables] if rotary else ())]
    outputs = ["out", "key", "value"]
    node = helper.make_node("Attention", inputs, outputs, domain="quill", **attributes | changes)
    types = (TensorProto.FLOAT, *[TensorProto.FLOAT16] * 2, *[TensorProto.INT32] * 2)
    kinds = dict(zip(NAMES, types, strict=True))
    constants = [
        onnx.numpy_helper.from_array(table.numpy(), name)
        for table, name in zip(tables(), ("cosines", "sines"), strict=True)
        if rotary
    ]
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()],
        [
            helper.make_tensor_value_info(name, kind, None)
            for name, kind in zip(outputs, types, strict=False)
        ],
        constants,
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("quill", 1)]
    path = directory / "attention.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


class Rows:
    """Rows with a cache of their own, as a server has them."""

    def __init__(self, path: Path, num_rows: int, num_threads: int = 2) -> None:
        self.session = open_session(path, num_threads, operators=True)
        shape = (num_rows, NUM_KV, CAPACITY, SIZE)
        self.keys, self.values = (np.full(shape, np.nan, np.float16) for _ in range(2))

    def attend(self, qkv: Array, lengths: list[int]) -> Array:
        """Appends the new tokens and attends; `lengths` include them."""
        last = np.array(lengths, np.int32) - 1
        given = (qkv, self.keys, self.values, last, np.array(max(lengths), np.int32))
        feeds = dict(zip(NAMES, given, strict=True))
        out, self.keys, self.values = self.session.run(None, feeds)
        assert isinstance(out, np.ndarray)
        return out


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tokens(num_rows: int, length: int) -> Array:
    return normal(num_rows, length, (NUM + 2 * NUM_KV) * SIZE)


@pytest.mark.parametrize("rotary", [True, False])
def test_it_attends_as_pytorch_does(rotary: bool, tmp_path: Path) -> None:
    qkv = tokens(2, 40)
    cached = Cached(CONFIG, tables() if rotary else None)
    cached.begin(torch.zeros(2, 40, dtype=torch.int64))
    expected = cached.self_attention(0, torch.from_numpy(qkv)).numpy()
    rows = Rows(save(tmp_path, rotary=rotary), 2)
    np.testing.assert_allclose(rows.attend(qkv, [40, 40]), expected, atol=2e-3)
    found = cached.key_value(0)
    np.testing.assert_allclose(rows.keys[:, :, :40], found.k_BKSH.numpy(), rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(rows.values[:, :, :40], found.v_BKSH.numpy().astype(np.float16))


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 33])
def test_a_prompt_gets_the_same_bits_however_it_is_cut(chunk: int, tmp_path: Path) -> None:
    path, qkv = save(tmp_path), tokens(1, 70)
    whole = Rows(path, 1).attend(qkv, [70])
    rows = Rows(path, 1, num_threads=1)
    ends = [*range(chunk, 70, chunk), 70]
    parts = [
        rows.attend(qkv[:, start:end], [end]) for start, end in zip([0, *ends], ends, strict=False)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_a_row_gets_the_same_bits_alone_and_in_a_crowd(tmp_path: Path) -> None:
    path, lengths = save(tmp_path), [5, 33, 70, 17, 16, 1, 48]
    qkv = tokens(len(lengths), 70)
    crowd = Rows(path, len(lengths))
    for row, length in enumerate(lengths):
        alone = Rows(path, 1)
        expected = alone.attend(qkv[row : row + 1, :length], [length])[:, -1:]
        crowd.keys[row], crowd.values[row] = alone.keys[0], alone.values[0]
        lone = Rows(path, 1)
        lone.keys, lone.values = alone.keys.copy(), alone.values.copy()
        at = qkv[row : row + 1, length - 1 : length]
        np.testing.assert_array_equal(lone.attend(at, [length]), expected)
    last = np.stack([qkv[row, length - 1 : length] for row, length in enumerate(lengths)])
    found = crowd.attend(last, lengths)
    for row, length in enumerate(lengths):
        lone = Rows(path, 1)
        lone.keys, lone.values = crowd.keys[row : row + 1], crowd.values[row : row + 1]
        np.testing.assert_array_equal(lone.attend(last[row : row + 1], [length])[0], found[row])


def test_all_kernels_compute_the_same_bits(tmp_path: Path) -> None:
    path, qkv = save(tmp_path), tokens(2, 53)
    qkv[0] *= 30  # one key decides
    qkv[1, :, ::7] *= 1e-6  # halves that have lost their leading one
    cache = np.zeros((2, NUM_KV, CAPACITY, SIZE), np.float16)
    given = (qkv, cache, cache, np.array([52, 52], np.int32), np.array(53, np.int32))
    feeds: dict[str, Array] = dict(zip(NAMES, given, strict=True))
    found = {kernels: computed_with(kernels, path, feeds) for kernels in KERNELS}
    plain = found.pop("plain")
    assert plain is not None
    for outputs in found.values():
        if outputs is not None:
            np.testing.assert_array_equal(outputs, plain)


def test_what_is_behind_a_row_in_its_cache_is_never_looked_at(tmp_path: Path) -> None:
    """Rows.keys begin as NaN: only what was written is finite."""
    rows = Rows(save(tmp_path), 3)
    assert np.isfinite(rows.attend(tokens(3, 20), [20, 20, 20])).all()
    assert np.isnan(rows.keys[:, :, 20:]).all()


def test_a_row_that_is_not_finite_spoils_no_other_and_is_not_hidden(tmp_path: Path) -> None:
    path, qkv = save(tmp_path), tokens(3, 20)
    good = Rows(path, 3).attend(qkv, [20] * 3)
    qkv[1, 4] = np.nan
    found = Rows(path, 3).attend(qkv, [20] * 3)
    np.testing.assert_array_equal(found[[0, 2]], good[[0, 2]])
    np.testing.assert_array_equal(found[1, :4], good[1, :4])
    assert np.isnan(found[1, 4:]).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 5}, "no such heads"),
        ({"heads": 0}, "no such heads"),
        ({"kv_heads": 0}, "no such heads"),
        ({"head_size": 40}, "no such heads"),
        ({"heads": 4}, "heads of another width"),
        ({"head_size": 128}, "heads of another width"),
        ({"num_tables": 1}, "cosines without sines"),
    ],
    ids=str,
)
def test_heads_that_do_not_fit_are_errors_not_crashes(
    changes: dict[str, int], words: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=words):
        Rows(save(tmp_path, **changes), 1).attend(tokens(1, 3), [3])


@pytest.mark.parametrize(
    ("num_new", "length", "words"),
    [
        (3, 2, "longer than its cache"),
        (1, 0, "longer than its cache"),
        (1, CAPACITY + 1, "longer than its cache"),
        (1, -(2**31) + 1, "longer than its cache"),
    ],
)
def test_lengths_that_do_not_fit_are_errors_not_crashes(
    num_new: int, length: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=words):
        Rows(save(tmp_path), 1).attend(tokens(1, num_new), [length])


def test_a_cache_of_another_shape_is_an_error(tmp_path: Path) -> None:
    rows = Rows(save(tmp_path), 2)
    with pytest.raises(Exception, match="a cache of another size"):
        rows.attend(tokens(1, 3), [3])
    rows = Rows(save(tmp_path), 1)
    rows.values = rows.values[:, :, :10]
    with pytest.raises(Exception, match="a cache of another size"):
        rows.attend(tokens(1, 3), [3])
