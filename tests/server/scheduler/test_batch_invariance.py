"""No token is ever alone in a kernel's tile."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quill.export.bundle.manifest import TILE
from quill.server.runtime.model_runner import OrtSession
from quill.server.scheduler.batch_invariance import chunk_length, padded
from tests.operators import SERVED
from tests.server.tiny_bundle import TinyBundle


@given(st.integers(2, 2000), st.integers(0, 600))
def test_chunks_leave_no_token_alone(remaining: int, max_chunk: int) -> None:
    chunks = []
    while remaining:
        chunks.append(chunk_length(remaining, max_chunk))
        remaining -= chunks[-1]
        assert chunks[-1] <= max(max_chunk, 3)
    assert all(chunk >= 2 and chunk % TILE != 1 for chunk in chunks)


def test_prompt_of_one_token_is_a_chunk() -> None:
    assert chunk_length(1, 100) == 1


def test_chunks_are_about_as_long_as_allowed() -> None:
    assert [chunk_length(1000, most) for most in (16, 17, 18, 256, 257)] == [16, 16, 18, 256, 256]
    assert [chunk_length(num, 256) for num in (2, 3, 17, 33, 257)] == [2, 3, 15, 31, 255]


def test_rows_are_padded_only_where_one_would_be_alone() -> None:
    assert [padded(num) for num in (0, 1, 2, 16, 17, 18, 129)] == [0, 2, 2, 16, 18, 18, 130]


def _logits(session: OrtSession, ids: list[int], cuts: list[int]) -> bytes:
    """The last token's logits, with the prompt cut there."""
    edges = [0, *cuts, len(ids)]
    for start, stop in itertools.pairwise(edges):
        logits = session.prefill(0, start, ids[start:stop], [stop - start - 1])
    return logits.tobytes()


@pytest.mark.parametrize("precision", SERVED)
def test_every_cut_that_leaves_no_token_alone_gives_the_same_bits(
    tiny_bundle: TinyBundle, precision: str
) -> None:
    rng = random.Random(0)
    ids = [rng.randrange(512) for _ in range(100)]
    session = tiny_bundle.session(precision, 1)
    whole = _logits(session, ids, [])
    allowed = [cut for cut in range(2, 99) if 1 not in (cut % TILE, (100 - cut) % TILE)]
    assert [cut for cut in allowed if _logits(session, ids, [cut]) != whole] == []
