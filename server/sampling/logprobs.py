"""Log-probabilities of tokens in the model's own distribution.

Knows: logits as the graph gave them. Does not know: penalties, temperature, how tokens are drawn.
"""

from collections.abc import Sequence

from quill.server.outputs import Alternative, PositionLogprobs
from quill.server.sampling import native
from quill.server.sampling.arrays import Logits

# R rows · V vocabulary · T most tops


def position_logprobs(
    logits_RV: Logits,
    tokens: Sequence[int],
    num_tops: Sequence[int],
    rows: Sequence[int] | None = None,
) -> list[PositionLogprobs]:
    """For each row: its token, and as many of the likeliest tokens as are asked for.

    Token i is of row i, or of rows[i].
    """
    if rows is None:
        rows = range(len(tokens))
    tops = native.tops(logits_RV, rows, num_tops)
    logprobs_R = logits_RV[list(rows), list(tokens)] - tops.log_totals_R
    return [
        PositionLogprobs(token, logprob, _alternatives(tops, i))
        for i, (token, logprob) in enumerate(zip(tokens, logprobs_R.tolist(), strict=True))
    ]


def _alternatives(tops: native.Tops, i: int) -> tuple[Alternative, ...]:
    num = tops.num_R[i]
    logprobs = tops.logits_RT[i, :num] - tops.log_totals_R[i]
    return tuple(map(Alternative, tops.ids_RT[i, :num].tolist(), logprobs.tolist()))
