"""The generator behind sampling gives the published numbers, everywhere and always."""

import numpy as np
import numpy.typing as npt
import pytest

from quill.model.randomness import GAMMA, MAX_SEED, sequence_seed, splitmix64, uniform

U64Array = npt.NDArray[np.uint64]


def test_splitmix64_gives_the_published_sequences() -> None:
    published = [0x599ED017FB08FC85, 0x2C73F08458540FA5, 0x883EBCE5A3F27C77, 0x3FBEF740E9177B3F]
    assert [splitmix64(1234567, index) for index in range(4)] == published
    of_zero = [-2152535657050944081 % 2**64, 7960286522194355700]
    assert [splitmix64(0, index) for index in range(2)] == of_zero


@pytest.mark.parametrize(
    ("seed", "position", "expected"),
    [
        (0, 0, 0.6524484863740322),
        (0, 1, 0.7012121095215252),
        (42, 0, 0.34329192209867343),
        (42, 1000, 0.6952598398323256),
        (2**64 - 1, 0, 0.3662420901697574),
        (2**64 - 1, 2**20, 0.6439801416380194),
    ],
)
def test_uniform_known_answers(seed: int, position: int, expected: float) -> None:
    assert uniform(seed, position) == expected


def test_uniform_in_vectorised_numpy_has_the_same_bits() -> None:
    seeds = np.arange(1000, dtype=np.uint64) * np.uint64(0x123456789ABCDEF)
    expected = [uniform(int(seed), 41) for seed in seeds]
    assert _vectorised_uniform(seeds, 41).tolist() == expected


def _vectorised_uniform(seeds: U64Array, position: int) -> npt.NDArray[np.float64]:
    def scramble(x: U64Array) -> U64Array:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    states = scramble(seeds + np.uint64(GAMMA))
    step = np.uint64((position + 1) * GAMMA & MAX_SEED)
    return (scramble(states + step) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def test_uniform_is_spread_evenly_over_positions_and_over_seeds() -> None:
    by_position = [uniform(7, position) for position in range(20_000)]
    by_seed = [uniform(seed, 7) for seed in range(20_000)]
    for numbers in (by_position, by_seed):
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        # Chi-squared with 19 degrees of freedom exceeds 43.8 once in a thousand.
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8
    assert abs(np.corrcoef(by_position[1:], by_position[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(by_position, by_seed)[0, 1]) < 0.03


def test_seeds_that_are_one_step_of_the_generator_apart_are_not_shifted_copies() -> None:
    first = [uniform(5, position) for position in range(100)]
    second = [uniform(5 + GAMMA, position) for position in range(100)]
    assert not set(first) & set(second)


def test_the_first_answer_has_the_requests_own_seed_and_the_others_differ() -> None:
    seeds = [sequence_seed(99, index) for index in range(64)]
    assert seeds[:3] == [99, 583982616703494564, 15398599001720869627]
    assert len(set(seeds)) == 64
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
