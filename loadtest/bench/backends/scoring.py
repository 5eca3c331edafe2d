"""Scores a backend's logits: how well they predict text, and how near they are to float32's.

Knows: the file that `prepare` wrote the reference's logits to. Does not know: any backend.
All backends score the same passages of token ids. The reference is the source's own weights in
float32; the file has its logits after each token but each passage's last, one below the other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quill.export.verify.token_scores import kl_divergence, score_sequence
from quill.loadtest.bench.backends.protocol import Score

# T tokens · V vocabulary

Logits = npt.NDArray[Any]


def score_passages(
    passages: Sequence[Sequence[int]],
    reference: str | None,
    logits_of: Callable[[Sequence[int]], Logits],
) -> Score:
    """`logits_of` gives those after each token of a passage; after the last one, they may lack.
    The file isn't read as a whole: it may be larger than all models."""
    expected_TV = None if reference is None else np.load(reference, mmap_mode="r")
    nll, kld, num_tokens = 0.0, 0.0, 0
    for ids in passages:
        first, num_tokens = num_tokens, num_tokens + len(ids) - 1
        logits_TV = np.asarray(logits_of(ids)[: len(ids) - 1], np.float32)
        nll += float(score_sequence(logits_TV, ids).nll.sum())
        if expected_TV is not None:
            kld += float(kl_divergence(logits_TV, expected_TV[first:num_tokens]).sum())
    return Score(nll, num_tokens, None if expected_TV is None else kld)
