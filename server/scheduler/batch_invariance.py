"""Batch invariance: how many tokens or rows a step may have, so that no answer depends on the rest.

Knows: a trait of the runtime's kernels. Does not know: requests, slots.

Kernels cut the tokens of a step into tiles: flash attention into tiles of twice the head size,
MatMulNBits into tiles of 128. A tile of a single token takes another kernel, which rounds
differently. Measured with SmolLM2: a prompt of 300 tokens cut at 129 moved its logits by 3e-5 in
fp32 and by 0.5 in int4; cut at 128 or 130, by nothing. Read at once, a prompt of 257 differs from
itself cut in two. Tiles are multiples of TILE, so a number that isn't 1 more than a multiple of it
leaves no token alone.
"""

import itertools

from quill.export.bundle.manifest import is_lone_tail

MIN_CHUNK = 2


def padded(num: int) -> int:
    """So many rows at least; one more if one of them would be alone."""
    return num + 1 if is_lone_tail(num) else num


def chunk_length(remaining: int, max_chunk: int) -> int:
    """How many of a prompt's remaining tokens to read now.

    No token is alone, now or later; except a prompt that has only one.
    """
    if remaining == 1:
        return 1
    longest = min(remaining, max(max_chunk, MIN_CHUNK))
    shorter, longer = range(longest, MIN_CHUNK - 1, -1), range(longest + 1, remaining + 1)
    for length in itertools.chain(shorter, longer):
        if remaining - length != 1 and not is_lone_tail(length):
            return length
    raise AssertionError("any number but 1 can be cut so")
