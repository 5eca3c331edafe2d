"""The attention operator: numpy's results, batch invariance, no crashes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from quill.export.verify.runner import Array, open_session
from tests.export.operators.attention_steps import (
    BLOCK,
    MAX_POSITIONS,
    Chunk,
    Pool,
    Shape,
    expected,
    normal,
    save,
    split_heads,
)
from tests.export.operators.custom_kernels import check_all_kernels_agree
from tests.operators import needs_operators

pytestmark = needs_operators

SHAPE = Shape()
SHAPES = [
    SHAPE,
    Shape(rotary=False),
    Shape(dtype="float32"),
    Shape(num=9, num_kv=3, size=64),
    Shape(num=4, num_kv=4, size=16),
    Shape(num=4, num_kv=1, size=80, dtype="float32"),
    Shape(num=7, num_kv=1, size=128),
    Shape(num=2, num_kv=1, size=256, rotary=False),
    Shape(num=50, num_kv=1, size=16, dtype="float32"),
    Shape(num=4, num_kv=2, size=32, window=100, dtype="float32"),
    Shape(num=4, num_kv=4, size=16, window=5, soft_cap=1.5, dtype="float32"),
    Shape(num=5, num_kv=1, size=176, value_size=144, rotary_size=32, dtype="float32"),
    Shape(num=4, num_kv=2, size=32, window=20, has_sinks=True, dtype="float32"),
    Shape(num=4, num_kv=2, size=64, has_sinks=True, dtype="float32"),
    Shape(num=6, num_kv=3, size=32, rotary=False, bias=True, dtype="float32"),
    Shape(num=6, num_kv=3, size=32, window=40, bias=True, has_sinks=True, dtype="float32"),
]


def num_blocks(length: int) -> int:
    return -(-length // BLOCK)


def unbatched(path: Path, shape: Shape, qkv: Array, num_threads: int = 2) -> Array:
    """A sequence in one chunk, unbatched."""
    pool = Pool(path, shape, num_blocks(len(qkv)), num_threads)
    return pool.step(Chunk(qkv, 0, range(num_blocks(len(qkv)))))[0]


@pytest.mark.portable
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_attends_as_numpy_does_and_keeps_keys_and_values(shape: Shape, tmp_path: Path) -> None:
    lengths, pool = (150, 1, 300, 17), Pool(save(tmp_path, shape), shape, 40)
    blocks = np.random.default_rng(1).permutation(40)
    places = np.split(blocks[:33], np.cumsum([num_blocks(length) for length in lengths])[:-1])
    prompts = [normal(length, shape.width, seed=length) for length in lengths]
    found = pool.step(*(Chunk(p, 0, b.tolist()) for p, b in zip(prompts, places, strict=True)))
    for qkv, place, out in zip(prompts, places, found, strict=True):
        q, k, v = split_heads(shape, qkv)
        tolerance = 3e-3 if shape.dtype == "float16" else 2e-5
        np.testing.assert_allclose(out, expected(shape, q, k, v, causal=True), atol=tolerance)
        keys, values = pool.kept(place.tolist(), len(qkv))
        np.testing.assert_allclose(keys, k, rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(values, v.astype(shape.dtype))


@pytest.mark.portable
@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 33, 128, 129])
@pytest.mark.parametrize("shape", [*SHAPES[2:5], *SHAPES[9:]], ids=str)
def test_a_prompt_gets_the_same_bits_however_it_is_cut(
    shape: Shape, chunk: int, tmp_path: Path
) -> None:
    path, qkv = save(tmp_path, shape), normal(300, shape.width)
    whole = unbatched(path, shape, qkv)
    pool, blocks = Pool(path, shape, 19, num_threads=1), range(19)
    ends = [*range(chunk, 300, chunk), 300]
    parts = [
        pool.step(Chunk(qkv[start:end], start, blocks))[0]
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


class RandomBatch:
    """Sequences of random lengths over shuffled blocks, some of which share a prefix."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.prompts = [normal(400, shape.width, seed=9)]  # the shared prefix
        self.tables: list[list[int]] = []
        self.free = self.random.permutation(600).tolist()
        self.tables.append([self.free.pop() for _ in range(num_blocks(400))])
        for index in range(12):
            shared = int(self.random.choice([0, 0, 128, 256, 272, 384]))
            own = normal(int(self.random.integers(1, 200)), shape.width, seed=100 + index)
            self.prompts.append(np.concatenate([self.prompts[0][:shared], own]))
            needed = num_blocks(shared + len(own))
            table = self.tables[0][: shared // BLOCK]
            self.tables.append([*table, *(self.free.pop() for _ in range(needed - len(table)))])

    def begun(self, index: int) -> int:
        """How much of it was there before."""
        prompt = self.prompts[index]
        last = int(self.random.choice([1, 1, 1, 2, 5, 40, 400]))
        return max(len(prompt) - last, 0)


@pytest.mark.parametrize("shape", [SHAPE, SHAPES[5], *SHAPES[8:]], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_sequence_gets_the_same_bits_alone_and_batched(
    shape: Shape, seed: int, tmp_path: Path
) -> None:
    path, batch = save(tmp_path, shape), RandomBatch(shape, seed)
    pool = Pool(path, shape, 600)
    wholes = [unbatched(path, shape, prompt) for prompt in batch.prompts]
    begun = [batch.begun(index) for index in range(len(wholes))]
    for prompt, table, past in zip(batch.prompts, batch.tables, begun, strict=True):
        if past:
            pool.step(Chunk(prompt[:past], 0, table))
    chunks = [
        Chunk(prompt[past:], past, table)
        for prompt, table, past in zip(batch.prompts, batch.tables, begun, strict=True)
    ]
    for order in (range(len(chunks)), batch.random.permutation(len(chunks))):
        found = pool.step(*(chunks[index] for index in order))
        for index, out in zip(order, found, strict=True):
            np.testing.assert_array_equal(out, wholes[index][begun[index] :])


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 300])
def test_threads_change_no_bit(window: int, has_sinks: bool, tmp_path: Path) -> None:
    """One token with a long past is cut into ranges of chunks."""
    shape = replace(SHAPE, window=window, has_sinks=has_sinks)
    path, qkv = save(tmp_path, shape), normal(MAX_POSITIONS, SHAPE.width)
    whole = unbatched(path, SHAPE, qkv, num_threads=1)
    np.testing.assert_array_equal(unbatched(path, SHAPE, qkv), whole)
    for num_threads in (1, 2, 5):
        pool, blocks = Pool(path, SHAPE, 40, num_threads), range(40)
        pool.step(Chunk(qkv[:-1], 0, blocks))
        np.testing.assert_array_equal(pool.step(Chunk(qkv[-1:], 639, blocks))[0], whole[-1:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_kernels_compute_the_same_bits(shape: Shape, tmp_path: Path) -> None:
    path, pool = save(tmp_path, shape), Pool(save(tmp_path, shape), shape, 40)
    qkv = normal(3, 170, shape.width)
    qkv[0] *= 30  # one key decides
    qkv[1, :, ::7] *= 1e-6  # halves that have lost their leading one
    chunks = [Chunk(heads, 0, range(11 * i, 11 * i + 11)) for i, heads in enumerate(qkv)]
    pool.keys, pool.values = np.zeros_like(pool.keys), np.zeros_like(pool.values)
    feeds = pool.feeds(chunks)
    check_all_kernels_agree(path, feeds)


@pytest.mark.portable
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_behind_a_sequence_is_never_looked_at(dtype: str, tmp_path: Path) -> None:
    """A pool begins as NaN: only what was written is finite."""
    shape = replace(SHAPE, dtype=dtype)
    pool = Pool(save(tmp_path, shape), shape, 30)
    for length in (20, 129, 150):
        qkv = normal(length, SHAPE.width)
        assert np.isfinite(pool.step(Chunk(qkv, 0, range(3, 13)))[0]).all()
        assert np.isfinite(pool.step(Chunk(qkv[-1:], length - 1, range(3, 13)))[0]).all()
        keys, values = pool.kept(range(3, 13), 160)
        assert np.isnan(keys[length:]).all()
        assert np.isnan(values[length:]).all()
        assert np.isnan(pool.keys[[0, 1, 2, *range(13, 30)]]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", [slice(None), slice(-64, None), slice(6 * 64, 7 * 64)], ids=str)
def test_what_is_not_finite_spoils_no_other_and_is_not_hidden(
    part: slice, bad: float, tmp_path: Path
) -> None:
    """All of a token, a value of the second group of heads, a key of the first."""
    path, qkv = save(tmp_path, SHAPE), normal(3, 160, SHAPE.width)
    chunks = [Chunk(heads, 0, range(10 * i, 10 * i + 10)) for i, heads in enumerate(qkv)]
    good = Pool(path, SHAPE, 30).step(*chunks)
    qkv[1, 4, part] = bad
    found = Pool(path, SHAPE, 30).step(*chunks)
    for index in (0, 2):
        np.testing.assert_array_equal(found[index], good[index])
    np.testing.assert_array_equal(found[1][:4], good[1][:4])
    reached = found[1][4:].reshape(156, 6, 64)
    if part.start is not None:
        reached = reached[:, :3] if part.start == 6 * 64 else reached[:, 3:]
    assert not np.isfinite(reached).any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 5}, "no such heads"),
        ({"heads": 0}, "no such heads"),
        ({"kv_heads": 0}, "no such heads"),
        ({"head_size": 40}, "no such heads"),
        ({"head_size": 656}, "no such heads"),
        ({"window": -1}, "no such heads"),
        ({"soft_cap": -1.0}, "no such heads"),
        ({"value_size": 72}, "no such heads"),
        ({"value_size": 80}, "no such heads"),
        ({"rotary_size": 66}, "no such heads"),
        ({"heads": 4}, "heads of another width"),
        ({"head_size": 128}, "heads of another width"),
        ({"num_tables": 1}, "cosines without sines"),
    ],
    ids=str,
)
def test_heads_that_do_not_fit_are_errors_not_crashes(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=words):
        Pool(save(tmp_path, SHAPE, **changes), SHAPE, 3).step(
            Chunk(normal(3, SHAPE.width), 0, range(3))
        )


@pytest.mark.parametrize(
    ("length", "blocks", "words"),
    [
        (46, range(3), "longer than its blocks"),
        (-1, range(3), "longer than its blocks"),
        (-(2**31), range(3), "longer than its blocks"),
        (2**31 - 1, range(3), "longer than its blocks"),
        (0, [], "longer than its blocks"),
        (17, [0, 40], "a block that isn't there"),
        (17, [-1, 3], "a block that isn't there"),
        (638, range(41), "a block that isn't there"),
        (638, [*range(40), 1], "longer than its positions"),
    ],
)
def test_sequences_that_do_not_fit_are_errors_not_crashes(
    length: int, blocks: Sequence[int], words: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=words):
        Pool(save(tmp_path, SHAPE), SHAPE, 40).step(Chunk(normal(3, SHAPE.width), length, blocks))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("query_starts", [0, 2], "starts of sequences"),
        ("query_starts", [1, 3], "starts of sequences"),
        ("query_starts", [0, 4], "starts of sequences"),
        ("query_starts", [], "no starts"),
        ("query_starts", [0, 5, 3], "starts of sequences"),
        ("query_starts", [0, 2, 3], "lengths for another number"),
        ("past_lengths", [0, 0], "lengths for another number"),
        ("block_table", [[0], [1]], "blocks for another number"),
        ("block_table", [0], "blocks for another number"),
    ],
)
def test_numbers_that_do_not_fit_are_errors_not_crashes(
    name: str, value: list[int], words: str, tmp_path: Path
) -> None:
    pool = Pool(save(tmp_path, SHAPE), SHAPE, 4)
    feeds = pool.feeds([Chunk(normal(3, SHAPE.width), 0, range(4))])
    with pytest.raises(Exception, match=words):
        pool.run(feeds | {name: np.array(value, np.int32)})


def test_sinks_of_other_heads_are_an_error(tmp_path: Path) -> None:
    path = save(tmp_path, replace(SHAPE, has_sinks=True), num_sinks=5)
    with pytest.raises(Exception, match="sinks of other heads"):
        Pool(path, SHAPE, 3).step(Chunk(normal(3, SHAPE.width), 0, range(3)))


def test_a_cache_of_another_shape_is_an_error(tmp_path: Path) -> None:
    pool, chunk = Pool(save(tmp_path, SHAPE), SHAPE, 4), Chunk(normal(3, SHAPE.width), 0, [0])
    keys, values = pool.keys, pool.values
    for bad_keys, bad_values in [
        (values, keys),
        (keys[:2], values),
        (keys[:, :1], values[:, :1]),
        (keys[..., :8], values[..., :8, :]),
    ]:
        pool.keys, pool.values = bad_keys, bad_values
        with pytest.raises(Exception, match="a cache of another size"):
            pool.step(chunk)


@pytest.mark.parametrize("name", ["key_cache", "value_cache", "new_key_cache", "new_value_cache"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_caches_of_different_types_are_an_error(dtype: str, name: str, tmp_path: Path) -> None:
    """Both kinds have one name: no graph may get a kernel of the other."""
    shape = replace(SHAPE, dtype=dtype)
    path = save(tmp_path, shape)
    graph = onnx.load(path)
    other = TensorProto.FLOAT if dtype == "float16" else TensorProto.FLOAT16
    for value in (*graph.graph.input, *graph.graph.output):
        if value.name == name:
            value.type.tensor_type.elem_type = other
    onnx.save(graph, path)
    with pytest.raises(Exception, match=r"[Tt]ype|Could not find an implementation"):
        open_session(path, 1)
