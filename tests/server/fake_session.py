"""A session with no model: its slots hold token ids, its logits are a function of them.

So whatever the engine does to slots must leave each row with exactly its own text, or the row's
tokens change.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quill.model.randomness import sequence_seed, uniform
from quill.model.reference.sampling import SamplingParameters, choose
from quill.server.request import Request
from quill.server.scheduler.plan import Copy

VOCAB_SIZE = 50
NOTHING = -1  # what a position holds before it is written

Logits = npt.NDArray[np.float32]


def logits_after(ids: Sequence[int]) -> Logits:
    """The 'model': logits that depend on every token of a text and on their order."""
    seed = zlib.crc32(np.array(ids, np.int64).tobytes())
    return (np.random.default_rng(seed).normal(size=VOCAB_SIZE) * 3).astype(np.float32)


class FakeSession:
    """Fails on demand: put an error into `failures`, and the next step raises it."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        self._ids_SC = np.full((num_slots, capacity), NOTHING)
        self._sources: list[list[int]] = [[] for _ in range(num_slots)]
        self.failures: list[Exception] = []
        self.poisoned: set[int] = set()  # rows of decode steps whose logits aren't finite
        self.chunks: list[tuple[int, int, int]] = []  # slot, start, stop
        self.num_decoded: list[int] = []  # rows of each decode step

    def prefill(self, slot: int, start: int, ids: Sequence[int], wanted: Sequence[int]) -> Logits:
        self._maybe_fail()
        assert NOTHING not in self._ids_SC[slot, :start], "what comes before was read"
        self._ids_SC[slot, start : start + len(ids)] = ids
        self.chunks.append((slot, start, start + len(ids)))
        after = [logits_after(self._read(slot, start + i + 1)) for i in wanted]
        return np.array(after, np.float32).reshape(len(after), VOCAB_SIZE)

    def decode(self, ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        self._maybe_fail()
        self.num_decoded.append(len(ids))
        logits = []
        for slot, (token, length) in enumerate(zip(ids, lengths, strict=True)):
            self._ids_SC[slot, length] = token
            logits.append(logits_after(self._read(slot, length + 1)))
        logits_RV = np.stack(logits)
        logits_RV[[row for row in self.poisoned if row < len(ids)]] = np.nan
        return logits_RV

    def encode(self, slot: int, source_ids: Sequence[int]) -> None:
        self._maybe_fail()
        self._sources[slot] = list(source_ids)

    def _read(self, slot: int, length: int) -> list[int]:
        """All that the slot has read: the source, if there is one, and its first positions."""
        return [*self._sources[slot], *self._ids_SC[slot, :length].tolist()]

    def copy(self, copy: Copy) -> None:
        held = self._ids_SC[copy.source, copy.start : copy.stop]
        assert NOTHING not in held
        self._ids_SC[copy.target, copy.start : copy.stop] = held
        if copy.with_source:
            self._sources[copy.target] = self._sources[copy.source]

    def read(self, slot: int, start: int, stop: int) -> npt.NDArray[Any]:
        return self._ids_SC[None, slot : slot + 1, start:stop, None].copy()

    def write(self, slot: int, start: int, positions: npt.NDArray[Any]) -> None:
        self._ids_SC[slot, start : start + positions.shape[2]] = positions[0, 0, :, 0]

    def _maybe_fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


def oracle(request: Request, context: int) -> list[list[int]]:
    """Each sequence of the answer, by the reference's rules, one token after another."""
    return [
        _sequence(request, sequence_seed(request.seed, index), context)
        for index in range(request.num_sequences)
    ]


def _sequence(request: Request, seed: int, context: int) -> list[int]:
    parameters = SamplingParameters(**vars(request.sampling))
    prompt, answer = list(request.prompt_ids), list[int]()
    for position in range(min(request.max_new_tokens, context - len(prompt))):
        logits_V = logits_after([*(request.source_ids or ()), *prompt, *answer])
        answer.append(choose(logits_V, parameters, prompt, answer, uniform(seed, position)))
        if answer[-1] in request.eos_ids | request.stop_ids:
            break
    return answer
