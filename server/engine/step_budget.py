"""How much of a step may be spent on prompts, guesses and forms, and what a token costs.

Knows: how long steps took. Does not know: clocks, who is served.

While rows run, the prompts' part of a step may take about as long as theirs, so that a long prompt
at most doubles the gap between a row's tokens; MIN_STALL_S where rows' steps are shorter than that,
and QUEUE_STALL_S while several short prompts wait, or a few rows would keep a crowd out.
With nobody running it may take IDLE_S: so soon a newcomer is looked at.

What steps cost are two lines, fitted to what they took. A prompt's token costs the more the more
comes before it. A step of rows and their guesses costs the more the more of them there are: that is
seen in steps without prompts, and if there are none for long, one is made.
Since answers don't depend on where prompts are cut, chunks may follow the clock.
"""

from collections.abc import Sequence
from typing import NamedTuple

STALL = 0.8  # of the time that rows take
MIN_STALL_S = 0.010
QUEUE_STALL_S = 0.1  # still faster than people read
FORCED_STALL = 0.1  # of the time that rows take: tokens that some rows' forms leave no choice of
MIN_FORCED_STALL_S = 0.0025
GAIN = 1.25  # of what a guess costs: so much it should save where others wait for it
MAX_FORCED = 64
IDLE_S = 0.25
MIN_CHUNK = 4
PROBE = 24  # steps in a row with prompts
MEMORY = 0.95  # what earlier steps count in a prompt's line, from step to step
ROWS_MEMORY = 0.99  # in that of rows, whose number hardly changes from step to step
FIRST_TOKEN_S = 0.004  # before anything is known
FIRST_LEAST_RATE = 0.3


class Chunk(NamedTuple):
    num_tokens: int
    past: int  # positions before them


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
        """`first_slope`: what it is taken for before the points have said it."""
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
        # Where all have the same x for a while, the line keeps its slope.
        self.slope = min(self.slope, 0.95 * mean_y / max(mean_x, 1.0))
        self._level = mean_y - self.slope * mean_x


class StepBudget:
    """Learns from every step."""

    def __init__(self) -> None:
        # A step, by how many rows and guesses it has.
        self._rows = _Line(0.0, ROWS_MEMORY, (0.05, 0.1))
        self._since_plain = 0
        self._tokens = _Line(FIRST_TOKEN_S, MEMORY, (0.1, 8))  # a prompt's, by what comes before

    @property
    def is_probing(self) -> bool:
        """Whether running rows should be alone in the next step."""
        return self._since_plain >= PROBE

    def give_up_probe(self) -> None:
        self._since_plain = 0

    def prompts_s(self, num_running: int, num_short: int) -> float:
        """The time that the next step has for prompts, of which so many could end with it."""
        if not num_running:
            return IDLE_S
        least_s = QUEUE_STALL_S if num_short > 1 else MIN_STALL_S
        return 0.0 if self.is_probing else max(STALL * self._rows.at(num_running), least_s)

    def cost_s(self, num_tokens: int, past: int) -> float:
        return num_tokens * self._tokens.at(past + num_tokens / 2)

    def num_affordable(self, time_s: float, past: int) -> int:
        return int(time_s / max(self._tokens.at(past), 1e-9))

    def least_rate(self, num_running: int) -> float:
        """How likely a guess must be right: it saves one row a step, and costs all rows time. In a
        crowd it should save more than that: those who guess gain, and the others wait."""
        if not self._rows.is_known or not self._rows.at(num_running):
            return FIRST_LEAST_RATE
        rate = num_running * self._rows.slope / self._rows.at(num_running)
        return rate if num_running < 2 else GAIN * rate

    def num_jump_forward(self, num_running: int) -> int:
        """How many tokens may be in a step that forms leave no choice of: a row that has several
        makes the others wait, who gain nothing by it. None where even these don't pay; alone,
        there are no others."""
        if self.least_rate(num_running) > 1:
            return 0
        if num_running < 2:
            return MAX_FORCED
        stall_s = max(FORCED_STALL * self._rows.at(num_running), MIN_FORCED_STALL_S)
        return max(1, min(MAX_FORCED, int(stall_s / max(self._rows.slope, 1e-9))))

    def note(
        self, duration_s: float, num_running: int, num_draft_tokens: int, chunks: Sequence[Chunk]
    ) -> None:
        """A step is over."""
        num_tokens = num_running + num_draft_tokens
        if not chunks and num_running:
            self._since_plain = 0
            # Until steps of several sizes were seen, a row costs what a prompt's token does.
            known = self._tokens.is_known
            first = self._tokens.mean if known else FIRST_LEAST_RATE * duration_s / num_tokens
            self._rows.add(num_tokens, duration_s, 1.0, first)
        elif chunks:
            self._since_plain += num_running > 0
            rows_s = self._rows.at(num_tokens) if num_running else 0.0
            self._note_chunks(chunks, max(duration_s - rows_s, 0.1 * duration_s))

    def _note_chunks(self, chunks: Sequence[Chunk], spent_s: float) -> None:
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        work = sum(chunk.num_tokens * (chunk.past + chunk.num_tokens / 2) for chunk in chunks)
        self._tokens.add(work / num_tokens, spent_s / num_tokens, num_tokens)
