"""How much of a step may go to prefill, draft tokens and jump-forward tokens, and what they cost.

Knows: how long steps took. Does not know: clocks, requests.

While sequences decode, prefill may take about as long as they do, so that a long prompt at most
doubles the time between two tokens; MIN_STALL_S where decode steps are shorter than that, and
QUEUE_STALL_S while several short prompts wait, or a few running sequences would keep many out.
Without a running sequence prefill may take IDLE_S: so soon a new request is looked at.

Costs are two lines, fitted to what steps took. A prompt's token costs more after a longer past. A
decode step costs more with more sequences and draft tokens: this is seen in steps without prefill,
and if there are none for long, one is made. Answers don't depend on how prompts are cut into
chunks, so chunks may follow the clock.
"""

from collections.abc import Sequence
from typing import NamedTuple

STALL = 0.8  # of the time of a decode
MIN_STALL_S = 0.010
QUEUE_STALL_S = 0.1  # still faster than people read
JUMP_FORWARD_STALL = 0.1  # of the time of a decode
MIN_JUMP_FORWARD_STALL_S = 0.0025
GAIN = 1.25  # times its cost: what a draft token should save where others wait for it
MAX_JUMP_FORWARD = 64
IDLE_S = 0.25
MIN_CHUNK = 4
PROBE = 24  # steps with prefill, one after another
PREFILL_MEMORY = 0.95  # the weight of earlier steps in the line of prompts, from step to step
DECODE_MEMORY = 0.99  # of decodes, whose size hardly changes from step to step
FIRST_TOKEN_S = 0.004  # before any step was seen
FIRST_MIN_ACCEPTANCE = 0.3


class ChunkSize(NamedTuple):
    num_tokens: int
    past: int  # tokens before them


class _Line:
    """y = level + slope · x, where new points count more than old ones."""

    def __init__(self, level: float, memory: float, tolerance: tuple[float, float]) -> None:
        self._level, self.slope = level, 0.0
        self._memory = memory
        self._tolerance = tolerance  # part of x, and more: where x is spread less, no slope is seen
        self._has_seen_slope = False
        self._sums = [0.0] * 5  # of weight, x, y, x², x · y

    @property
    def is_known(self) -> bool:
        return self._sums[0] > 0

    @property
    def mean(self) -> float:
        """Of all y."""
        return self._sums[2] / self._sums[0] if self.is_known else self._level

    def at(self, x: float) -> float:
        return self._level + self.slope * x

    def add(self, x: float, y: float, weight: float, first_slope: float = 0.0) -> None:
        """`first_slope`: the slope until the points show it."""
        if self.is_known and self.at(x) > 0:  # one slow step is noise
            y = min(y, 4 * self.at(x))
        new = (1, x, y, x * x, x * y)
        self._sums = [
            self._memory * old + weight * each for old, each in zip(self._sums, new, strict=True)
        ]
        total, *sums = self._sums
        mean_x, mean_y, square, product = (each / total for each in sums)
        spread = square - mean_x**2
        part, more = self._tolerance
        if spread > (part * mean_x + more) ** 2:
            self._has_seen_slope = True
            self.slope = max(0.0, (product - mean_x * mean_y) / spread)
        elif not self._has_seen_slope:
            self.slope = first_slope
        # While all points have the same x, the line keeps its slope.
        self.slope = min(self.slope, 0.95 * mean_y / max(mean_x, 1.0))
        self._level = mean_y - self.slope * mean_x


class StepBudget:
    """Learns from every step."""

    def __init__(self) -> None:
        # A decode, by how many sequences and draft tokens it has.
        self._decode = _Line(0.0, DECODE_MEMORY, (0.05, 0.1))
        self._since_decode = 0
        self._prefill = _Line(
            FIRST_TOKEN_S, PREFILL_MEMORY, (0.1, 8)
        )  # a prompt's, by what comes before

    @property
    def is_probing(self) -> bool:
        """Whether the next step should be a decode alone."""
        return self._since_decode >= PROBE

    def give_up_probe(self) -> None:
        self._since_decode = 0

    def prefill_s(self, num_decoding: int, num_short: int) -> float:
        """The time that the next step has for prompts, `num_short` of which could end with it."""
        if not num_decoding:
            return IDLE_S
        min_s = QUEUE_STALL_S if num_short > 1 else MIN_STALL_S
        return 0.0 if self.is_probing else max(STALL * self._decode.at(num_decoding), min_s)

    def cost_s(self, num_tokens: int, past: int) -> float:
        return num_tokens * self._prefill.at(past + num_tokens / 2)

    def num_affordable(self, time_s: float, past: int) -> int:
        return int(time_s / max(self._prefill.at(past), 1e-9))

    def min_acceptance(self, num_decoding: int) -> float:
        """How likely a draft token must be accepted: it saves one sequence a step, and costs all
        sequences time. In a batch it should save more: one sequence gains, and the others wait."""
        if not self._decode.is_known or not self._decode.at(num_decoding):
            return FIRST_MIN_ACCEPTANCE
        rate = num_decoding * self._decode.slope / self._decode.at(num_decoding)
        return rate if num_decoding < 2 else GAIN * rate

    def num_jump_forward(self, num_decoding: int) -> int:
        """How many jump-forward tokens a step may have: a sequence with several makes the others
        wait, who gain nothing. 0 where even these don't pay; alone, there are no others."""
        if self.min_acceptance(num_decoding) > 1:
            return 0
        if num_decoding < 2:
            return MAX_JUMP_FORWARD
        stall_s = max(JUMP_FORWARD_STALL * self._decode.at(num_decoding), MIN_JUMP_FORWARD_STALL_S)
        return max(1, min(MAX_JUMP_FORWARD, int(stall_s / max(self._decode.slope, 1e-9))))

    def observe(
        self,
        duration_s: float,
        num_decoding: int,
        num_draft_tokens: int,
        chunks: Sequence[ChunkSize],
    ) -> None:
        """Learns from a step."""
        num_tokens = num_decoding + num_draft_tokens
        if not chunks and num_decoding:
            self._since_decode = 0
            # Until steps of several sizes were seen, a sequence costs what a prompt's token does.
            known = self._prefill.is_known
            first = self._prefill.mean if known else FIRST_MIN_ACCEPTANCE * duration_s / num_tokens
            self._decode.add(num_tokens, duration_s, 1.0, first)
        elif chunks:
            self._since_decode += num_decoding > 0
            decode_s = self._decode.at(num_tokens) if num_decoding else 0.0
            self._observe_chunks(chunks, max(duration_s - decode_s, 0.1 * duration_s))

    def _observe_chunks(self, chunks: Sequence[ChunkSize], spent_s: float) -> None:
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        work = sum(chunk.num_tokens * (chunk.past + chunk.num_tokens / 2) for chunk in chunks)
        self._prefill.add(work / num_tokens, spent_s / num_tokens, num_tokens)
