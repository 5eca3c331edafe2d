"""The random number behind each token, for a whole step at once.

Knows: integers. Does not know: tokens, who draws.

The same bits as the reference, model/randomness.py, which says why they are made so: SplitMix64, a
pure function of a seed and a position. Written twice on purpose: the reference is the oracle.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

UInt64Array = npt.NDArray[np.uint64]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """For each seed, the number in [0, 1) of the answer's token at that position, from 0."""
    states = _splitmix64(np.array(seeds, np.uint64), np.zeros(len(seeds), np.uint64))
    bits = _splitmix64(states, np.array(positions, np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sequence_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th answer to one request; the first answer has the request's own."""
    if index == 0:
        return seed
    return int(_splitmix64(np.array([seed], np.uint64), np.array([index], np.uint64))[0])


def _splitmix64(seeds: UInt64Array, indices: UInt64Array) -> UInt64Array:
    # Arrays, not scalars: numpy warns about wrapping around for scalars only.
    x = seeds + (indices + np.uint64(1)) * _GAMMA
    x = (x ^ (x >> np.uint64(30))) * _FACTORS[0]
    x = (x ^ (x >> np.uint64(27))) * _FACTORS[1]
    scrambled: UInt64Array = x ^ (x >> np.uint64(31))
    return scrambled
