"""Finds the greatest logits of every row in a few passes over the whole batch.

Knows: arrays. Does not know: tokens, temperature, who asked.

The vocabulary is cut into G groups. The k-th greatest of a row's group maxima is a threshold
that at least k logits reach, and few more do. At 32 x 49,152 and k = 50, finding them takes about
1 ms; argpartition takes 9.
"""

from typing import NamedTuple

import numpy as np

from quill.server.sampling.arrays import Ids, Logits

# R rows · V vocabulary · G groups · N greatest of all rows together


_GROUPS_PER_TOKEN = 8  # fewer: more than k reach the threshold; more: more maxima to look through


class TopK(NamedTuple):
    """Every logit that reaches its row's threshold, by row, then by id."""

    rows_N: Ids
    ids_N: Ids
    thresholds_R: Logits


def find_top_k(logits_RV: Logits, k: int) -> TopK:
    """At least the k greatest of each row, with all that equal the least of them.

    -inf is never among them. With no more than k tokens in the vocabulary, everything else is.
    """
    vocab_size = logits_RV.shape[1]
    thresholds_R = _thresholds(logits_RV, k)
    lowest = np.finfo(np.float32).min
    reached = np.flatnonzero(logits_RV >= np.maximum(thresholds_R, lowest)[:, None])
    rows_N, ids_N = np.divmod(reached, vocab_size)
    return TopK(rows_N, ids_N, thresholds_R)


def _thresholds(logits_RV: Logits, k: int) -> Logits:
    num_rows, vocab_size = logits_RV.shape
    if k >= vocab_size:
        return np.full(num_rows, -np.inf, np.float32)
    num_groups = k * _GROUPS_PER_TOKEN
    size = vocab_size // num_groups
    if size < 2:
        return _kth_greatest(logits_RV, k)
    # Any cut into groups will do. This one makes each pass run along the memory.
    whole_RV = logits_RV[:, : size * num_groups]
    return _kth_greatest(whole_RV.reshape(num_rows, size, num_groups).max(axis=1), k)


def _kth_greatest(values_RG: Logits, k: int) -> Logits:
    place = values_RG.shape[1] - k
    # Its own memory: qemu 7.2, which the tests run in as other processors, has a numpy.maximum that
    # is wrong for every such column of 8 or more (a real processor's isn't).
    kth_R: Logits = np.partition(values_RG, place, axis=1)[:, place].copy()
    return kth_R
