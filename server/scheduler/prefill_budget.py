"""How many tokens of prompts may be read between two decode steps.

Knows: how long steps took. Does not know: clocks, who is served.

A chunk may take about as long as a decode step, so that a long prompt at most doubles the gap
between a running row's tokens. Short chunks are inefficient, though: a chunk of two tokens costs
most of a chunk of ten. So where decode steps are short a chunk may take MIN_STALL_S, and
QUEUE_STALL_S while more requests wait, or a few rows would keep the whole queue out. Short prompts
share that time: as long as another one like the last would fit, it is read as well.
Since answers don't depend on where prompts are cut, the length may follow the clock.
"""

STALL = 0.9  # a chunk's time, in decode steps
MIN_STALL_S = 0.025
QUEUE_STALL_S = 0.1  # still faster than people read
MIN_CHUNK = 8


class PrefillBudget:
    """Learns the length of chunk that takes the time it may take."""

    def __init__(self, max_chunk: int = 256) -> None:
        self._max_chunk = max_chunk
        self._chunk = float(MIN_CHUNK)
        self._decode_s = 0.0
        self._spent_s = 0.0  # since the last decode step
        self._last_s = 0.0  # of that, for the last chunk
        self._target_s = MIN_STALL_S

    @property
    def may_go_on(self) -> bool:
        """Whether another prompt may be read before the next decode step."""
        return self._spent_s + self._last_s <= self._target_s

    def max_chunk(self, num_rows: int) -> int:
        """With nobody running, nobody is kept waiting."""
        if not num_rows:
            return self._max_chunk
        left = max(0.0, 1 - self._spent_s / self._target_s)
        return max(int(self._chunk * left), MIN_CHUNK)

    def note_decode(self, duration_s: float) -> None:
        self._spent_s = self._last_s = 0.0
        # Smoothed: one slow step is noise.
        self._decode_s += 0.2 * (duration_s - self._decode_s) if self._decode_s else duration_s

    def note_prefill(self, num_tokens: int, duration_s: float, num_waiting: int) -> None:
        least_s = QUEUE_STALL_S if num_waiting else MIN_STALL_S
        self._target_s = target_s = max(STALL * self._decode_s, least_s)
        self._spent_s += duration_s
        self._last_s = duration_s
        is_full = num_tokens >= int(self._chunk)
        if not is_full and duration_s <= target_s:
            return  # a short prompt says nothing about longer chunks
        ratio = min(max(target_s / max(duration_s, 1e-6), 0.25), 4.0)
        chunk = (self._chunk if is_full else num_tokens) * ratio**0.5  # half way: times are noisy
        self._chunk = min(max(chunk, MIN_CHUNK), self._max_chunk)
