"""The operator ShortConv: numpy's results, the same bits however a prompt is cut, no crashes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quill.export.verify.runner import Array, open_session
from tests.export.operators.attention_steps import (
    BLOCK,
    CACHE_TYPES,
    CACHES,
    STEP,
    Chunk,
    normal,
    padded,
    starts,
)
from tests.export.operators.custom_kernels import FLOAT, check_all_kernels_agree, save_operator
from tests.operators import needs_operators

pytestmark = needs_operators

INT32 = 6


@dataclass(frozen=True)
class Shape:
    num: int = 3  # heads of half of the channels
    size: int = 16
    taps: int = 3
    dtype: str = "float16"
    has_bias: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.num * self.size

    @property
    def kernel(self) -> Array:
        return normal(self.taps, self.channels, seed=1)

    @property
    def bias(self) -> Array:
        return normal(self.channels, seed=2)


SHAPES = [
    Shape(),
    Shape(dtype="float32", has_bias=True),
    Shape(num=1, size=48, taps=5, dtype="float32"),
    Shape(num=2, taps=1),
    Shape(num=1, taps=40, has_bias=True),
]


def save(directory: Path, shape: Shape, **changes: Any) -> Path:
    kernel, cache = changes.pop("kernel", shape.kernel), CACHE_TYPES[shape.dtype]
    attributes = {"heads": shape.num, "kv_heads": shape.num, "head_size": shape.size}
    attributes |= {"taps": shape.taps} | changes
    constants = {"kernel": kernel} | ({"bias": shape.bias} if shape.has_bias else {})
    inputs = {"x": FLOAT, **dict.fromkeys(CACHES, cache), **dict.fromkeys(STEP, INT32)}
    return save_operator(
        directory,
        "ShortConv",
        ["x", "kernel", *CACHES, *STEP, *(["bias"] if shape.has_bias else [])],
        inputs,
        {"y": FLOAT, **{f"new_{name}": cache for name in CACHES}},
        constants,
        {"scale": 1.0, **attributes},
    )


class Pool:
    """Blocks that begin as NaN: only what was written is finite."""

    def __init__(self, path: Path, shape: Shape, num_blocks: int, num_threads: int = 2) -> None:
        self._session = open_session(path, num_threads)
        heads = (num_blocks, shape.num)
        self.keys = np.full((*heads, shape.size, BLOCK), np.nan, shape.dtype)
        self.values = np.full((*heads, BLOCK, shape.size), np.nan, shape.dtype)

    def feeds(self, *chunks: Chunk) -> dict[str, Array]:
        return {
            "x": np.concatenate([chunk.heads for chunk in chunks]),
            **dict(zip(CACHES, (self.keys, self.values), strict=True)),
            "query_starts": starts([len(chunk.heads) for chunk in chunks]),
            "past_lengths": np.array([chunk.length for chunk in chunks], np.int32),
            "block_table": padded([chunk.blocks for chunk in chunks]),
        }

    def step(self, *chunks: Chunk) -> list[Array]:
        y, self.keys, self.values = self._session.run(None, self.feeds(*chunks))
        return np.split(y, np.cumsum([len(chunk.heads) for chunk in chunks])[:-1])


def expected(shape: Shape, x: Array) -> Array:
    x, kernel = x.astype(shape.dtype).astype(np.float64), shape.kernel.astype(np.float64)
    y = np.tile(shape.bias.astype(np.float64) if shape.has_bias else 0.0, (len(x), 1))
    y = np.broadcast_to(y, x.shape).copy()
    for at in range(len(x)):
        for tap in range(shape.taps):
            source = at - (shape.taps - 1) + tap
            if source >= 0:
                y[at] += kernel[tap] * x[source]
    return y


@pytest.mark.portable
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_convolves_as_numpy_does_however_a_prompt_is_cut_and_batched(
    shape: Shape, tmp_path: Path
) -> None:
    path, lengths = save(tmp_path, shape), (70, 1, 33, 16)
    blocks = np.random.default_rng(0).permutation(20).tolist()
    tables = [blocks[5 * i : 5 * i + 5] for i in range(4)]
    prompts = [normal(length, shape.channels, seed=length) for length in lengths]
    together = Pool(path, shape, 20).step(
        *(Chunk(x, 0, table) for x, table in zip(prompts, tables, strict=True))
    )
    for x, table, found in zip(prompts, tables, together, strict=True):
        np.testing.assert_allclose(found, expected(shape, x), atol=2e-5)
        for cut in (1, 2, 7, 16, 31):
            pool = Pool(path, shape, 20, num_threads=1)
            parts = [
                pool.step(Chunk(x[at : at + cut], at, table))[0] for at in range(0, len(x), cut)
            ]
            np.testing.assert_array_equal(np.concatenate(parts), found)


@pytest.mark.portable
def test_a_sequence_can_go_back_and_share_its_full_blocks(tmp_path: Path) -> None:
    """As after draft tokens that were rejected, and with a cached prefix."""
    shape = SHAPES[0]
    path, x, other = save(tmp_path, shape), normal(40, shape.channels), normal(9, shape.channels)
    whole = Pool(path, shape, 3).step(Chunk(x, 0, [0, 1, 2]))[0]
    pool = Pool(path, shape, 4)
    pool.step(Chunk(np.concatenate([x[:20], other]), 0, [0, 1, 2]))
    np.testing.assert_array_equal(pool.step(Chunk(x[20:], 20, [0, 1, 2]))[0], whole[20:])
    np.testing.assert_array_equal(pool.step(Chunk(x[16:], 16, [0, 3, 2]))[0], whole[16:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_kernels_compute_the_same_bits(shape: Shape, tmp_path: Path) -> None:
    path = save(tmp_path, shape)
    pool = Pool(path, shape, 6)
    pool.keys, pool.values = np.zeros_like(pool.keys), np.zeros_like(pool.values)
    x = normal(2, 40, shape.channels)
    check_all_kernels_agree(path, pool.feeds(Chunk(x[0], 0, range(3)), Chunk(x[1], 5, range(3, 6))))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"taps": 0}, "no such convolution"),
        ({"taps": 65}, "no such convolution"),
        ({"heads": 6}, "no such convolution"),
        ({"value_size": 16, "head_size": 32}, "no such convolution"),
        ({"head_size": 24}, "no such heads"),
        ({"taps": 4}, "weights of another size"),
        ({"kernel": normal(3, 64)}, "weights of another size"),
    ],
    ids=str,
)
def test_convolutions_that_do_not_fit_are_errors_not_crashes(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    shape = SHAPES[0]
    with pytest.raises(Exception, match=words):
        Pool(save(tmp_path, shape, **changes), shape, 3).step(
            Chunk(normal(3, shape.channels), 0, range(3))
        )


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (Chunk(normal(3, 64), 0, [0]), "heads of another width"),
        (Chunk(normal(3, 96), 46, [0, 1, 2]), "longer than its blocks"),
        (Chunk(normal(3, 96), -1, [0]), "longer than its blocks"),
        (Chunk(normal(3, 96), 17, [-1, 1]), "a block that isn't there"),
        (Chunk(normal(3, 96), 17, [0, 3]), "a block that isn't there"),
    ],
    ids=str,
)
def test_steps_that_do_not_fit_are_errors_not_crashes(
    chunk: Chunk, words: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=words):
        Pool(save(tmp_path, SHAPES[0]), SHAPES[0], 3).step(chunk)
