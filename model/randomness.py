"""The random number behind each token: a pure function of a seed and a position.

Knows: integers. Does not know: tokens, models, sampling.

Nothing is kept between two calls, so the same request gives the same tokens alone, batched,
or replayed from its middle. The generator is SplitMix64 (Steele, Lea, Flood 2014), which counts:
its n-th output is a scramble of seed + n x GAMMA. Everything is arithmetic modulo 2**64, so every
language and every vector unit gives the same bits.

Written twice on purpose: server/sampling/sampler.py does a whole step at once, imports nothing
from here, and must give the same bits. Its tests hold it against this module.
"""

GAMMA = 0x9E3779B97F4A7C15
MAX_SEED = 2**64 - 1


def scramble(x: int) -> int:
    """SplitMix64's finaliser: 64 bits in, 64 well-mixed bits out."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return x ^ (x >> 31)


def splitmix64(seed: int, index: int) -> int:
    """Output number `index`, counted from 0, of SplitMix64 started at `seed`."""
    assert 0 <= seed <= MAX_SEED
    assert index >= 0
    return scramble((seed + (index + 1) * GAMMA) & MAX_SEED)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) for the token at `position`, counted from 0 in the generated tokens.

    The seed is scrambled first: otherwise the seeds s and s + GAMMA would be the same sequence,
    one step apart. Of the 64 bits the upper 53 are used, as many as a float64 holds.
    """
    return (splitmix64(splitmix64(seed, 0), position) >> 11) * 2.0**-53


def sequence_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th answer to one request; the first answer has the request's own."""
    return seed if index == 0 else splitmix64(seed, index)
