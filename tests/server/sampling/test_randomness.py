"""The server's random numbers are the reference's, to the last bit."""

from hypothesis import given
from hypothesis import strategies as st

from quill.model import randomness as reference
from quill.server.sampling.sampler import sequence_seed, uniforms

SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**31)


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=8))
def test_uniforms_are_the_reference_ones(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = zip(*pairs, strict=True)
    assert uniforms(seeds, positions).tolist() == [reference.uniform(*pair) for pair in pairs]


@given(SEEDS, st.integers(0, 1000))
def test_sequence_seeds_are_the_reference_ones(seed: int, index: int) -> None:
    assert sequence_seed(seed, index) == reference.sequence_seed(seed, index)
