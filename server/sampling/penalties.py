"""What the text so far, and the client, say about single tokens: rules 1 to 3 of sampling.

Knows: one row's tokens, its sampling. Does not know: the other rows, how a token is drawn. The same
rules as the reference, model/reference/sampling.py, written twice on purpose: it is the oracle.
Only the tokens that are adjusted are ever looked at, not the whole vocabulary.
"""

from collections.abc import Collection, Iterable

import numpy as np

from quill.server.request import SamplingParams
from quill.server.sampling.native import Ids, Logits, Scores

# A adjusted tokens · V vocabulary


class Adjustments:
    """One row's adjusted tokens. Grows with its answer."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_ids: tuple[int, ...],
        max_new_tokens: int,
        banned: Collection[int] = (),
    ) -> None:
        """`banned`: tokens that can't be chosen until they are allowed."""
        self._sampling = sampling
        repeats = sampling.repetition_penalty != 1
        known = {
            **dict.fromkeys(prompt_ids if repeats else ()),
            **sampling.logit_bias,
            **dict.fromkeys(banned),
        }
        self._places = {token: place for place, token in enumerate(known)}
        size = len(known) + max_new_tokens
        self._ids = np.zeros(size, np.int64)
        self._ids[: len(known)] = list(known)
        self._in_text = np.zeros(size, np.bool_)
        self._in_text[[self._places[token] for token in prompt_ids if token in known]] = True
        self._counts = np.zeros(size)  # in the answer
        self._bias = np.zeros(size)
        self._bias[: len(known)] = [sampling.logit_bias.get(token, 0.0) for token in known]
        self._bias[[self._places[token] for token in banned]] = -np.inf
        arrays = (self._ids, self._in_text, self._counts, self._bias)
        self._addresses = tuple(array.ctypes.data for array in arrays)

    def allow(self, tokens: Iterable[int]) -> None:
        """Known ones: they have the client's bias and no other."""
        for token in tokens:
            self._bias[self._places[token]] = self._sampling.logit_bias.get(token, 0.0)

    def add(self, token: int) -> None:
        """The answer has this token (once more)."""
        place = self._places.setdefault(token, len(self._places))
        self._ids[place] = token
        self._in_text[place] = True
        self._counts[place] += 1

    def addresses(self) -> tuple[int, ...]:
        """How many tokens there are, and where: ids, whether in the text, counts, biases."""
        return len(self._places), *self._addresses

    def ids(self) -> Ids:
        return self._ids[: len(self._places)]

    def scores(self, logits_V: Logits) -> Scores:
        """The adjusted logits of `ids()`."""
        num = len(self._places)
        sampling, counts_A = self._sampling, self._counts[:num]
        scores_A = logits_V[self._ids[:num]].astype(np.float64)
        penalty = sampling.repetition_penalty
        penalised_A = np.where(scores_A > 0, scores_A / penalty, scores_A * penalty)
        scores_A = np.where(self._in_text[:num], penalised_A, scores_A)
        dues_A = sampling.frequency_penalty * counts_A + sampling.presence_penalty
        scores_A = np.where(counts_A > 0, scores_A - dues_A, scores_A)
        return scores_A + self._bias[:num]
