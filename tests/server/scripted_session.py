"""A session with no model that recites, so that tests know what it will say.

After a letter comes the next one of the alphabet, after z an a; after "Z" the text ends; after "é"
comes "é", which is two bytes and so two tokens. Steps can be held back and let go.
"""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quill.server.engine.model_runner import BlockCopy, Chunk, ModelOutput, Source

VOCAB_SIZE = 257
END = 0  # <|endoftext|>; the token of a byte is byte + 1
D_MODEL = 4
TIMEOUT_S = 120  # of what never takes a second on a machine that isn't busy
Logits = npt.NDArray[np.float32]


def token_of(byte: int) -> int:
    return byte + 1


def following(token: int) -> int:
    byte = token - 1
    if byte == ord("Z"):
        return END
    pairs = {ord("z"): ord("a"), 0xC3: 0xA9, 0xA9: 0xC3}
    if byte in pairs:
        return token_of(pairs[byte])
    is_letter = byte < 0xFF and chr(max(byte, 0)).isalpha()  # after the last byte comes none
    return token_of(byte + 1) if is_letter else token_of(ord("a"))


def hidden_of(token: int) -> list[float]:
    """What is read of a token, whatever comes before it."""
    return [token, 1.0, -token, 0.5]


class Reciter:
    """Put an error into `failures`, and the next step raises it."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.num_steps = 0
        self.num_rows = 0  # chunks of the last step
        self._changed = threading.Condition()
        self._allowed: int | None = None  # steps that may still run; None: all

    def hold(self) -> None:
        """No step begins any more."""
        with self._changed:
            self._allowed = 0

    def let_go(self, num_steps: int | None = None) -> None:
        """So many steps may run; without a number, all."""
        with self._changed:
            both = num_steps is not None and self._allowed is not None
            self._allowed = (self._allowed or 0) + (num_steps or 0) if both else None
            self._changed.notify_all()

    def wait_for_steps(self, num_steps: int) -> None:
        with self._changed:
            reached = self._changed.wait_for(lambda: self.num_steps >= num_steps, TIMEOUT_S)
        assert reached, f"{self.num_steps} steps instead of {num_steps}"

    def step(self, chunks: Sequence[Chunk]) -> ModelOutput:
        self._step()
        self.num_rows = len(chunks)
        logits_LV = _logits([chunk.ids[i] for chunk in chunks for i in chunk.logits_at])
        hidden = [hidden_of(chunk.ids[i]) for chunk in chunks for i in chunk.hidden_at]
        return ModelOutput(logits_LV, np.array(hidden, np.float32).reshape(len(hidden), D_MODEL))

    def encode(self, sources: Sequence[Source]) -> None:
        pass

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        pass

    def _step(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._allowed != 0, TIMEOUT_S)
            if self._allowed is not None:
                self._allowed -= 1
            self.num_steps += 1
            self._changed.notify_all()
            if self.failures:
                raise self.failures.pop(0)


def _logits(ids: Sequence[int]) -> Logits:
    logits_LV = np.zeros((len(ids), VOCAB_SIZE), np.float32)
    logits_LV[np.arange(len(ids)), [following(token) for token in ids]] = 20.0
    return logits_LV
