"""The slow, obvious decoder: what every faster path is compared with.

Knows: how to ask a network for the next token's logits, when an answer ends. Does not know: the
rules of choosing (model/reference/sampling.py), beams (model/reference/beam_search.py), text.

By default each step reads the whole sequence again, one row at a time: nothing is kept, so
nothing can be stale. With `cached=True` it keeps keys and values, for those who can't wait.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quill.model.errors import CheckpointError, RequestError
from quill.model.network.attention import CrossKeyValue
from quill.model.network.network import Network
from quill.model.randomness import MAX_SEED, uniform
from quill.model.reference.sampling import SamplingParameters, choose, log_probabilities

# R sequences · T tokens · V vocabulary

FinishReason = Literal["stop", "length"]
LogitsArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Generation:
    """One answer. Its last token is the one that stopped it, if one did."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of each token, in the model's own distribution
    finish_reason: FinishReason  # "length": max_new_tokens or the context was used up


def generate(
    model: Network,
    prompt_ids: Sequence[int],
    parameters: SamplingParameters,
    seed: int = 0,
    *,
    source_ids: Sequence[int] | None = None,
    cached: bool = False,
) -> Generation:
    """Continues `prompt_ids`. A seq2seq model also reads `source_ids`; its prompt is [bos]."""
    check_request(model, prompt_ids, source_ids, [*parameters.logit_bias, *parameters.stop_ids])
    if not 0 <= seed <= MAX_SEED:
        raise RequestError(f"the seed is {seed}; it must be from 0 to 2**64 - 1")
    next_logits = open_decoder(model, source_ids, cached)
    generated: list[int] = []
    logprobs: list[float] = []
    for position in range(num_new_tokens(model, prompt_ids, parameters.max_new_tokens)):
        logits_V = next_logits([[*prompt_ids, *generated]], [0])[0]
        token = choose(logits_V, parameters, prompt_ids, generated, uniform(seed, position))
        generated.append(token)
        logprobs.append(float(log_probabilities(logits_V)[token]))
        if token in parameters.stop_ids:
            return Generation(tuple(generated), tuple(logprobs), "stop")
    return Generation(tuple(generated), tuple(logprobs), "length")


def num_new_tokens(model: Network, prompt_ids: Sequence[int], max_new_tokens: int) -> int:
    """How many tokens may follow: prompt and answer together fit into the context."""
    return min(max_new_tokens, model.config.context - len(prompt_ids))


def check_request(
    model: Network,
    prompt_ids: Sequence[int],
    source_ids: Sequence[int] | None,
    other_ids: Collection[int],
) -> None:
    """Refuses what the network can't take. `other_ids` are only checked for being tokens."""
    context = model.config.context
    if model.config.family == "encoder":
        raise RequestError("an encoder reads and doesn't write; causal and seq2seq models do")
    if (source_ids is not None) != (model.config.family == "seq2seq"):
        given = "no source" if source_ids is None else "a source"
        raise RequestError(f"a {model.config.family} model was given {given}; only seq2seq has one")
    if not 1 <= len(prompt_ids) < context:
        raise RequestError(
            f"the prompt has {len(prompt_ids)} tokens; it must have at least 1 and leave space for "
            f"an answer in the context of {context}"
        )
    if source_ids is not None and not 1 <= len(source_ids) <= context:
        raise RequestError(
            f"the source has {len(source_ids)} tokens; it must have from 1 to {context}"
        )
    for token in (*prompt_ids, *(source_ids or ()), *other_ids):
        if not 0 <= token < model.config.vocab_size:
            raise RequestError(
                f"there is no token {token}; the vocabulary has {model.config.vocab_size} tokens"
            )


class NextLogits(Protocol):
    """Answers the logits of the token after each row."""

    def __call__(self, rows: Sequence[Sequence[int]], parents: Sequence[int]) -> LogitsArray:
        """Row i is row parents[i] of the call before, and one token more."""


def open_decoder(
    model: Network, source_ids: Sequence[int] | None, cached: bool
) -> "RecomputedLogits | CachedLogits":
    assert not model.training, "dropout would make the answer random: call model.eval() first"
    cross = None if source_ids is None else _encode(model, source_ids)
    return CachedLogits(model, cross) if cached else RecomputedLogits(model, cross)


class RecomputedLogits:
    """Runs every sequence from its first token, unbatched, every time."""

    def __init__(self, model: Network, cross: CrossKeyValue | None) -> None:
        self._model = model
        self._cross = cross

    @torch.no_grad()
    def __call__(self, rows: Sequence[Sequence[int]], parents: Sequence[int]) -> LogitsArray:
        logits = [self._model(_tensor(self._model, [row]), self._cross)[0, -1] for row in rows]
        return _to_numpy(torch.stack(logits))


class CachedLogits:
    """Reads only the tokens that are new, all rows at once."""

    def __init__(self, model: Network, cross: CrossKeyValue | None) -> None:
        self._model = model
        self._attending = model.cached(cross)
        self._num_read = 0

    @torch.no_grad()
    def __call__(self, rows: Sequence[Sequence[int]], parents: Sequence[int]) -> LogitsArray:
        self._attending.reorder(_tensor(self._model, parents))
        new_RT = _tensor(self._model, [row[self._num_read :] for row in rows])
        self._num_read += new_RT.shape[1]
        hidden_RTD = self._model.hidden(new_RT, self._attending)
        return _to_numpy(self._model.project(hidden_RTD[:, -1]))


@torch.no_grad()
def _encode(model: Network, source_ids: Sequence[int]) -> CrossKeyValue:
    source_1S = _tensor(model, [source_ids])
    return model.encode(source_1S, torch.ones_like(source_1S, dtype=torch.bool))


def _tensor(model: Network, ids: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(ids, device=model.output_weight_VD.device)


def _to_numpy(logits_RV: Tensor) -> LogitsArray:
    logits: LogitsArray = logits_RV.to("cpu", torch.float32).numpy()
    if not np.isfinite(logits).all():
        raise CheckpointError("the network's logits aren't finite; its weights are damaged")
    return logits
