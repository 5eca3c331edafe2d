"""The rules by which a token is chosen from logits, one row at a time.

Knows: numpy arrays, token ids. Does not know: torch, caches, text, where a random number comes
from (see model/randomness.py).

Written twice on purpose: the server's sampler (server/sampling/sampler.py and what it calls) is
fast, imports nothing from here, and must choose the same token from the same float32 logits. Its
tests hold it against this module. The logits become float64 at once and stay so. Then, in this
order:

1. repetition penalty r, for each token that the prompt or the answer has: l / r where l > 0,
   else l x r;
2. frequency penalty f and presence penalty p, for each token that the *answer* has, n times so
   far: l - (f x n + p);
3. logit bias, added; and while the answer has fewer than min_new_tokens, the tokens that would end
   it have l = -inf. So have those that a mask forbids, where an answer keeps to a form;
4. temperature 0: the greatest l wins, the lowest id among equals, and nothing below applies;
5. temperature T: weights w = exp((l - greatest l) / T), so the greatest weight is exactly 1;
6. candidates are sorted by l descending, then by id ascending;
7. top-k keeps the first k: never more than k, whatever the ties;
8. top-p keeps the shortest head whose share of the weight that is left reaches p, including the
   candidate that crosses;
9. min-p keeps w >= min_p. It compares with the best candidate, which no cut removes, so shares
   need not be worked out again after the cuts above;
10. sampling takes the first candidate whose running sum of weights exceeds u x their total, where
    u in [0, 1) is the position's random number. Running sums go in candidate order, one by one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quill.model.errors import RequestError

# V vocabulary · C candidates, best first

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]  # whether each token may be chosen


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """How tokens are sampled. The defaults: from the model's distribution, unchanged."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_new_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()  # tokens that end the answer
    min_new_tokens: int = 0  # before so many, none of them is chosen

    def __post_init__(self) -> None:
        self._require("temperature", 0 <= self.temperature < math.inf, "finite and at least 0")
        self._require("top_k", self.top_k >= 0, "at least 0, where 0 is off")
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1, where 1 is off")
        self._require("min_p", 0 <= self.min_p <= 1, "from 0 to 1, where 0 is off")
        repetition_allowed = 0 < self.repetition_penalty < math.inf
        self._require("repetition_penalty", repetition_allowed, "finite and above 0")
        self._require("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2")
        self._require("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2")
        biases_allowed = all(-100 <= bias <= 100 for bias in self.logit_bias.values())
        self._require("logit_bias", biases_allowed, "from -100 to 100 for each token")
        self._require("max_new_tokens", self.max_new_tokens >= 1, "at least 1")
        min_allowed = 0 <= self.min_new_tokens <= self.max_new_tokens
        self._require("min_new_tokens", min_allowed, "from 0 to max_new_tokens")

    def _require(self, name: str, allowed: bool, rule: str) -> None:
        if not allowed:
            raise RequestError(f"{name} is {getattr(self, name)}; it must be {rule}")


class Candidates(NamedTuple):
    """The tokens that may be sampled, best first. The first weight is 1."""

    ids_C: IntArray
    weights_C: FloatArray


def log_probabilities(logits_V: npt.NDArray[np.floating]) -> FloatArray:
    """The model's own distribution: what reported logprobs are of, whatever the parameters."""
    relative_V = logits_V.astype(np.float64) - np.float64(logits_V.max())
    log_probs_V: FloatArray = relative_V - np.log(np.exp(relative_V).sum())
    return log_probs_V


def penalize(
    logits_V: npt.NDArray[np.floating],
    parameters: SamplingParameters,
    prompt_ids: Sequence[int],
    generated_ids: Sequence[int],
) -> FloatArray:
    """Rules 1 to 3: what the text so far, and the client, say about single tokens."""
    scores_V = logits_V.astype(np.float64)
    for token in {*prompt_ids, *generated_ids}:
        if scores_V[token] > 0:
            scores_V[token] /= parameters.repetition_penalty
        else:
            scores_V[token] *= parameters.repetition_penalty
    for token in set(generated_ids):
        count = generated_ids.count(token)
        scores_V[token] -= parameters.frequency_penalty * count + parameters.presence_penalty
    for token, bias in parameters.logit_bias.items():
        scores_V[token] += bias
    if len(generated_ids) < parameters.min_new_tokens:
        scores_V[[*parameters.stop_ids]] = -math.inf
    return scores_V


def truncate(scores_V: FloatArray, parameters: SamplingParameters) -> Candidates:
    """Rules 5 to 9: which tokens may be sampled, and with what weight."""
    ids_C = np.argsort(-scores_V, kind="stable")
    with np.errstate(over="ignore"):  # a tiny temperature gives exp(-inf) = 0, as it should
        weights_C = np.exp((scores_V[ids_C] - scores_V.max()) / parameters.temperature)
    num_kept = len(ids_C)
    if parameters.top_k:
        num_kept = min(num_kept, parameters.top_k)
    if parameters.top_p < 1:
        sums_C = np.cumsum(weights_C[:num_kept])
        num_kept = int(np.argmax(sums_C >= parameters.top_p * sums_C[-1])) + 1
    num_kept = min(num_kept, int(np.count_nonzero(weights_C >= parameters.min_p)))
    return Candidates(ids_C[:num_kept], weights_C[:num_kept])


def sample(candidates: Candidates, u: float) -> int:
    """Rule 10."""
    sums_C = np.cumsum(candidates.weights_C)
    return int(candidates.ids_C[np.argmax(sums_C > u * sums_C[-1])])


def choose(
    logits_V: npt.NDArray[np.floating],
    parameters: SamplingParameters,
    prompt_ids: Sequence[int],
    generated_ids: Sequence[int],
    u: float,
    mask_V: Mask | None = None,
) -> int:
    """All the rules: the token that follows the prompt and what was generated so far."""
    scores_V = penalize(logits_V, parameters, prompt_ids, generated_ids)
    if mask_V is not None:
        scores_V[~mask_V] = -math.inf
    if parameters.temperature == 0:
        return int(scores_V.argmax())
    return sample(truncate(scores_V, parameters), u)
