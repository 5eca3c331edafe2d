"""How much of a step may be spent on prompts, and what a token costs.

Knows: how long steps took. Does not know: clocks, who is served.

While rows run, the prompts' part of a step may take about as long as theirs, so that a long prompt
at most doubles the gap between a row's tokens; MIN_STALL_S where rows' steps are shorter than that,
and QUEUE_STALL_S while several short prompts wait, or a few rows would keep a crowd out.
With nobody running it may take IDLE_S: so soon a newcomer is looked at. A prompt's token costs the
more the more comes before it: a line, fitted to what steps took. What rows need is seen in steps
without prompts and guesses; if there are none for long, one is made.
Since answers don't depend on where prompts are cut, chunks may follow the clock.
"""

from collections.abc import Sequence
from typing import NamedTuple

STALL = 0.8  # of the time that rows take
MIN_STALL_S = 0.010
QUEUE_STALL_S = 0.1  # still faster than people read
IDLE_S = 0.25
MIN_CHUNK = 4
PROBE = 24  # steps in a row with prompts or guesses
MEMORY = 0.95  # what earlier steps count in the fit, from step to step
SMOOTHING = 0.2
FIRST_TOKEN_S = 0.004  # before anything is known
FIRST_LEAST_RATE = 0.3


class Chunk(NamedTuple):
    num_tokens: int
    past: int  # positions before them


class StepBudget:
    """Learns from every step."""

    def __init__(self) -> None:
        self._rows_s = 0.0  # what a step without prompts takes
        self._guess_s: float | None = None  # what a guess adds to it
        self._since_plain = 0
        self._token_s, self._past_s = FIRST_TOKEN_S, 0.0  # a token; for each position before it
        self._sums = [0.0] * 5  # of weight, past, time, past², past · time

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
        return 0.0 if self.is_probing else max(STALL * self._rows_s, least_s)

    def cost_s(self, num_tokens: int, past: int) -> float:
        return num_tokens * (self._token_s + self._past_s * (past + num_tokens / 2))

    def num_affordable(self, time_s: float, past: int) -> int:
        return int(time_s / max(self._token_s + self._past_s * past, 1e-9))

    def least_rate(self, num_running: int) -> float:
        """How likely a guess must be right: it saves one row a step, and costs all rows time."""
        if not self._rows_s:
            return FIRST_LEAST_RATE
        return num_running * self._one_guess_s / self._rows_s

    @property
    def _one_guess_s(self) -> float:
        weight, _, token_s, *_ = self._sums
        prompt_s = token_s / weight if weight else self._token_s
        return prompt_s if self._guess_s is None else self._guess_s

    def note(
        self, duration_s: float, num_running: int, num_guesses: int, chunks: Sequence[Chunk]
    ) -> None:
        """A step is over."""
        if num_running and (chunks or num_guesses):
            self._since_plain += 1
        if not chunks and not num_guesses and num_running:
            self._since_plain = 0
            self._rows_s = _smoothed(self._rows_s or duration_s, duration_s)
        elif num_guesses and not chunks:
            extra_s = max(0.0, duration_s - self._rows_s) / num_guesses
            self._guess_s = extra_s if self._guess_s is None else _smoothed(self._guess_s, extra_s)
        elif chunks:
            rows_s = self._rows_s + num_guesses * self._one_guess_s if num_running else 0.0
            spent_s = duration_s - rows_s
            self._fit(chunks, max(spent_s, 0.1 * duration_s))

    def _fit(self, chunks: Sequence[Chunk], spent_s: float) -> None:
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        work = sum(chunk.num_tokens * (chunk.past + chunk.num_tokens / 2) for chunk in chunks)
        past, token_s = work / num_tokens, spent_s / num_tokens
        if self._sums[0]:  # one slow step is noise
            token_s = min(token_s, 4 * (self._token_s + self._past_s * past))
        new = (1, past, token_s, past * past, past * token_s)
        self._sums = [
            MEMORY * old + num_tokens * each for old, each in zip(self._sums, new, strict=True)
        ]
        weight, *sums = self._sums
        mean_past, mean_s, square, product = (each / weight for each in sums)
        spread = square - mean_past**2
        if spread > (0.1 * mean_past + 8) ** 2:
            self._past_s = max(0.0, (product - mean_past * mean_s) / spread)
        # Where all have the same past so far, the line keeps its slope.
        self._past_s = min(self._past_s, 0.95 * mean_s / max(mean_past, 1.0))
        self._token_s = mean_s - self._past_s * mean_past


def _smoothed(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old)
