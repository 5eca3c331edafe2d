"""Attention to sources: in an encoder, written to blocks, and cross-attention of a decoder."""

from pathlib import Path

import numpy as np
import pytest

from quill.export.verify.runner import Array, open_session
from tests.export.operators.attention_steps import (
    Pool,
    Shape,
    expected,
    normal,
    padded,
    save,
    split_heads,
    starts,
)
from tests.export.operators.custom_kernels import KERNELS, computed_with
from tests.operators import needs_operators

pytestmark = needs_operators

LENGTHS = (150, 1, 16, 300, 129)
BLOCKS = [range(10), [30], [31], range(10, 29), range(32, 41)]
SHAPES = [
    Shape(num=4, num_kv=4, rotary=False),
    Shape(num=4, num_kv=2, size=80, dtype="float32"),
    Shape(num=8, num_kv=8, size=16, dtype="float32", rotary=False),
]
BIASED = Shape(num=4, num_kv=4, size=32, dtype="float32", rotary=False, bias=True)


def run(path: Path, feeds: dict[str, Array], num_threads: int = 2) -> list[Array]:
    found = open_session(path, num_threads).run(None, feeds)
    return [each for each in found if isinstance(each, np.ndarray)]


def encode(path: Path, sources: list[Array], num_threads: int = 2) -> list[Array]:
    counts = [len(source) for source in sources]
    feeds = {"qkv": np.concatenate(sources), "query_starts": starts(counts)}
    return np.split(run(path, feeds, num_threads)[0], np.cumsum(counts)[:-1])


@pytest.mark.portable
@pytest.mark.parametrize("shape", [*SHAPES, BIASED], ids=str)
def test_an_encoder_looks_at_all_of_its_own_source(shape: Shape, tmp_path: Path) -> None:
    path = save(tmp_path, shape, "EncoderAttention")
    sources = [normal(length, shape.width, seed=length) for length in LENGTHS]
    together = encode(path, sources)
    for source, out in zip(sources, together, strict=True):
        wanted = expected(shape, *split_heads(shape, source), causal=False)
        np.testing.assert_allclose(out, wanted, atol=2e-5)
        np.testing.assert_array_equal(encode(path, [source], num_threads=1)[0], out)


def stored(directory: Path, shape: Shape) -> tuple[Pool, list[Array], list[Array]]:
    """A pool with sources in it, and their keys and values."""
    pool = Pool(save(directory, shape, "Store"), shape, 41)
    width = shape.num_kv * shape.size
    keys, values = (
        [normal(length, width, seed=seed + length) for length in LENGTHS] for seed in (0, 1000)
    )
    feeds = {
        "keys": np.concatenate(keys),
        "values": np.concatenate(values),
        "key_cache": pool.keys,
        "value_cache": pool.values,
        "query_starts": starts(LENGTHS),
        "block_table": padded([list(blocks) for blocks in BLOCKS]),
    }
    found = pool.session.run(None, feeds)
    pool.keys, pool.values = (each for each in found if isinstance(each, np.ndarray))
    return pool, keys, values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sources_are_kept_in_their_blocks_and_nowhere_else(shape: Shape, tmp_path: Path) -> None:
    pool, keys, values = stored(tmp_path, shape)
    for key, value, blocks in zip(keys, values, BLOCKS, strict=True):
        kept = pool.kept(blocks, len(blocks) * 16)
        for given, found in zip((key, value), kept, strict=True):
            wanted = given.reshape(len(given), shape.num_kv, shape.size).astype(shape.dtype)
            np.testing.assert_array_equal(found[: len(given)], wanted)
            assert np.isnan(found[len(given) :]).all()
    assert np.isnan(pool.keys[29]).all()


def look(directory: Path, shape: Shape, pool: Pool, who: list[int], q: list[Array]) -> list[Array]:
    path = save(directory, shape, "CrossAttention")
    feeds = {
        "q": np.concatenate(q),
        "key_cache": pool.keys,
        "value_cache": pool.values,
        "query_starts": starts([len(each) for each in q]),
        "source_lengths": np.array([LENGTHS[index] for index in who], np.int32),
        "source_table": padded([list(BLOCKS[index]) for index in who]),
    }
    return np.split(run(path, feeds)[0], np.cumsum([len(each) for each in q])[:-1])


@pytest.mark.portable
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_decoder_looks_at_its_source_alone_and_batched(shape: Shape, tmp_path: Path) -> None:
    """Beams look at the same source, with one token or several."""
    pool, keys, values = stored(tmp_path, shape)
    who, counts = [3, 0, 3, 1, 3, 2, 0, 4, 3, 3], [1, 1, 2, 1, 30, 5, 1, 1, 1, 1]
    q = [normal(n, shape.num * shape.size, seed=i) for i, n in enumerate(counts)]
    together = look(tmp_path, shape, pool, who, q)
    for index, heads, out in zip(who, q, together, strict=True):
        split = [
            each[index].reshape(LENGTHS[index], shape.num_kv, shape.size).astype(shape.dtype)
            for each in (keys, values)
        ]
        tokens = heads.reshape(len(heads), shape.num, shape.size)
        wanted = expected(shape, tokens, split[0], split[1], causal=False)
        np.testing.assert_allclose(out, wanted, atol=2e-5)
        np.testing.assert_array_equal(look(tmp_path, shape, pool, [index], [heads])[0], out)


@pytest.mark.portable
def test_all_kernels_compute_the_same_bits(tmp_path: Path) -> None:
    cases = (("EncoderAttention", SHAPES[1]), ("EncoderAttention", BIASED), ("Store", SHAPES[1]))
    for operator, shape in cases:
        width = shape.num_kv * shape.size
        pool = Pool(save(tmp_path, shape, "Store"), shape, 10)
        feeds: dict[str, Array] = {"query_starts": starts([150])}
        if operator == "Store":
            zeros = np.zeros_like(pool.keys), np.zeros_like(pool.values)
            feeds |= {"keys": normal(150, width), "values": normal(150, width)}
            feeds |= {"key_cache": zeros[0], "value_cache": zeros[1]}
            feeds |= {"block_table": np.arange(10, dtype=np.int32)[None]}
        else:
            feeds |= {"qkv": normal(150, shape.width)}
        path = save(tmp_path, shape, operator)
        found = [computed_with(kernels, path, feeds) for kernels in KERNELS]
        for outputs in found[1:]:
            if outputs is not None:
                np.testing.assert_array_equal(outputs, found[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source_lengths": [17]}, "longer than its blocks"),
        ({"source_lengths": [-1]}, "longer than its blocks"),
        ({"source_lengths": [0]}, "nothing to look at"),
        ({"source_table": [[41]]}, "a block that isn't there"),
        ({"source_table": [[-1]]}, "a block that isn't there"),
        ({"source_table": [[0], [1]]}, "blocks for another number"),
        ({"source_lengths": [1, 1]}, "lengths for another number"),
        ({"query_starts": [0, 2]}, "starts of sequences"),
    ],
    ids=str,
)
def test_sources_that_do_not_fit_are_errors_not_crashes(
    change: dict[str, list[int]], words: str, tmp_path: Path
) -> None:
    shape = SHAPES[0]
    pool, path = stored(tmp_path, shape)[0], save(tmp_path, shape, "CrossAttention")
    feeds = {"q": normal(1, shape.num * shape.size)}
    feeds |= {"key_cache": pool.keys, "value_cache": pool.values}
    numbers = {"query_starts": [0, 1], "source_lengths": [16], "source_table": [[0]]} | change
    feeds |= {name: np.array(value, np.int32) for name, value in numbers.items()}
    with pytest.raises(Exception, match=words):
        run(path, feeds)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"keys": normal(2, 256)}, "values for other tokens"),
        ({"values": normal(3, 128)}, "heads of another width"),
        ({"block_table": np.array([[41]], np.int32)}, "a block that isn't there"),
        ({"block_table": np.zeros((1, 0), np.int32)}, "longer than its blocks"),
        ({"query_starts": np.array([0, 9], np.int32)}, "starts of sequences"),
    ],
    ids=["keys", "values", "block", "blocks", "starts"],
)
def test_what_cannot_be_stored_is_an_error_not_a_crash(
    change: dict[str, Array], words: str, tmp_path: Path
) -> None:
    shape = SHAPES[0]
    pool = Pool(save(tmp_path, shape, "Store"), shape, 41)
    feeds = {"keys": normal(3, 256), "values": normal(3, 256), "key_cache": pool.keys}
    feeds |= {"value_cache": pool.values, "query_starts": np.array([0, 3], np.int32)}
    feeds |= {"block_table": np.zeros((1, 1), np.int32)}
    with pytest.raises(Exception, match=words):
        pool.session.run(None, feeds | change)


@pytest.mark.parametrize(
    ("length", "num_starts", "words"),
    [
        (700, 2, "longer than its positions"),
        (701, 2, "longer than its bias"),
        (5, 0, "no starts"),
        (5, 1, "starts of sequences"),
    ],
)
def test_an_encoder_refuses_what_does_not_fit(
    length: int, num_starts: int, words: str, tmp_path: Path
) -> None:
    shape = BIASED if words.endswith("bias") else SHAPES[1]
    feeds = {"qkv": normal(length, shape.width), "query_starts": starts([length])[:num_starts]}
    with pytest.raises(Exception, match=words):
        run(save(tmp_path, shape, "EncoderAttention"), feeds)
