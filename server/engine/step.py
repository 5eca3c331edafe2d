"""One step: what to run (SchedulerOutput), sampling from the model's logits, what came of it
(StepOutput).

Knows: sequences, logits, grammars' masks. Does not know: why sequences were chosen, blocks' memory.

Masks are computed by threads while the model runs: neither waits for the other.
"""

import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from quill.server.engine.model_runner import BlockCopy, Chunk, ModelOutput, Source
from quill.server.engine.sequence import Sequence
from quill.server.machine.resources import num_cores
from quill.server.outputs import Event, PositionLogprobs, StepKind
from quill.server.request import Masks
from quill.server.sampling.beam_search import Continuation, Search, rank
from quill.server.sampling.native import Hidden, Logits
from quill.server.sampling.sampler import SamplerInput, position_logprobs, sample

if TYPE_CHECKING:  # strategies make these records
    from quill.server.engine.strategies import Strategy


class ScheduledChunk(NamedTuple):
    """A chunk for the model, and the sequences that get tokens from its logits."""

    chunk: Chunk
    group: "Strategy"
    sequence: Sequence
    to_sample: SequenceOf[Sequence]  # none before a prompt's end; then all of the request
    draft: list[int]  # the last of the chunk's ids, to accept or reject
    is_jump_forward: bool = False  # the draft is all that the sequence's grammar allows
    is_prefill: bool = True  # of a prompt, or of what was preempted


@dataclass(eq=False, slots=True)
class SchedulerOutput:
    """What to run: copies of blocks first, then sources to encode, then the chunks."""

    decode: list[ScheduledChunk] = field(default_factory=list)
    prefill: list[ScheduledChunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    copying: list["Strategy"] = field(default_factory=list)  # the groups whose copies they are
    encoding: list["Strategy"] = field(default_factory=list)
    started: list["Strategy"] = field(default_factory=list)  # they run for the first time
    num_preempted: int = 0
    at_risk: list["Strategy"] = field(default_factory=list)  # they fail if what runs now does

    @property
    def chunks(self) -> list[ScheduledChunk]:
        return self.decode + self.prefill

    @property
    def sources(self) -> list[Source]:
        return [
            Source(group.request.source_ids or (), group.source_blocks) for group in self.encoding
        ]

    @property
    def kind(self) -> StepKind:
        if not self.prefill:
            return "decode"
        return "mixed" if self.decode else "prefill"

    @property
    def num_draft_tokens(self) -> int:
        return sum(len(each.draft) for each in self.decode)

    @property
    def num_prefill_tokens(self) -> int:
        """Of prompts, of sources, and of what was preempted."""
        num_sources = sum(group.request.num_prompt for group in self.encoding)
        return sum(len(each.chunk.ids) for each in self.prefill) + num_sources

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + self.num_draft_tokens + self.num_prefill_tokens


class Choice(NamedTuple):
    """A sampled token."""

    token: int
    logprobs: PositionLogprobs | None
    is_finite: bool  # the logits that the token was sampled from; else the token means nothing


@dataclass(eq=False, slots=True)
class StepOutput:
    """What came of a step: the sampler fills the first part, the sequences' update the second."""

    choices: list[list[Choice]]  # of each chunk: one for a sequence to sample, or a draft token
    hidden: list[Hidden]  # of each chunk
    continuations: dict[str, list[Continuation]]  # of each beam search, by request
    prompt_logprobs: dict[str, list[PositionLogprobs]]  # by request
    now_s: float = 0.0  # after the step
    masks_s: float | None = None  # until all grammars' masks were there; None: there were none
    not_finite: set[str] = field(default_factory=set)  # requests whose logits weren't finite

    events: list[Event] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)  # requests whose grammar became too complex
    num_accepted: int = 0  # draft tokens
    num_jump_forward: int = 0  # of the accepted draft tokens


# L logits · V vocabulary · M hidden states · D model size

MAX_THREADS = 8


@dataclass(eq=False)
class StepMasks:
    """Which tokens the grammars of one step's sequences allow."""

    by_place: dict[int, Masks] = field(default_factory=dict)  # among the step's chunks
    duration_s: float | None = None  # until the last was there; None: no sequence has a grammar


class MaskThreads:
    """Computes masks in threads of its own, while the model runs. The threads end with it."""

    def __init__(self) -> None:
        # The model's own threads have work on all cores.
        self._num_threads = min(MAX_THREADS, max(1, num_cores() // 2))
        self._pool = ThreadPoolExecutor(self._num_threads, "masks")

    @contextmanager
    def computing(self, chunks: SequenceOf[ScheduledChunk]) -> Iterator[StepMasks]:
        """The masks are there when the block has ended, however it ended."""
        constrained = [
            (place, each)
            for place, each in enumerate(chunks)
            if each.to_sample and each.to_sample[0].matcher is not None
        ]
        step_masks, began_s = StepMasks(), time.perf_counter()
        shares = [constrained[first :: self._num_threads] for first in range(self._num_threads)]
        futures = [self._pool.submit(_compute_masks, share) for share in shares if share]
        try:
            yield step_masks
        finally:
            results = [future.result() for future in futures]
        for masks, ended_s in results:
            step_masks.by_place |= masks
            step_masks.duration_s = max(step_masks.duration_s or 0.0, ended_s - began_s)


def _compute_masks(
    constrained: SequenceOf[tuple[int, ScheduledChunk]],
) -> tuple[dict[int, Masks], float]:
    """And when they were there."""
    masks = {place: each.to_sample[0].masks(each.draft) for place, each in constrained}
    return masks, time.perf_counter()


def sample_step(
    chunks: SequenceOf[ScheduledChunk], computed: ModelOutput, masks: StepMasks
) -> StepOutput:
    """Tokens for all sequences to sample, continuations for all beams, logprobs of prompts."""
    logits_LV, hidden_MD = computed
    firsts = list(accumulate((len(each.chunk.logits_at) for each in chunks), initial=0))
    prompt_logprobs = {
        each.group.request_id: each.group.prompt_logprobs(each.chunk, logits_LV[first:last])
        for each, first, last in zip(chunks, firsts, firsts[1:], strict=False)
        if each.is_prefill and _is_scored(each)
    }
    continuations, not_finite = _rank(logits_LV, chunks, firsts)
    not_finite |= {name for name, some in prompt_logprobs.items() if not _are_finite(some)}
    return StepOutput(
        _sample(logits_LV, chunks, firsts, masks),
        _split(hidden_MD, chunks),
        continuations,
        prompt_logprobs,
        masks_s=masks.duration_s,
        not_finite=not_finite,
    )


def _sample(
    logits_LV: Logits, chunks: SequenceOf[ScheduledChunk], firsts: SequenceOf[int], masks: StepMasks
) -> list[list[Choice]]:
    """After a prompt, a token for each sequence; else one for a sequence and each draft token."""
    inputs: list[SamplerInput] = []
    places: list[int] = []  # of each input: among the logits
    num_tops: list[int | None] = []
    bounds = [0]
    for place, each in enumerate(chunks):
        if each.to_sample:
            some = each.group.sampler_inputs(each, masks.by_place.get(place))
            first = firsts[place]
            if each.is_prefill:
                places += [firsts[place + 1] - 1] * len(some)
            else:
                places += range(first, first + len(some))
            num_tops += [each.sequence.request.logprobs] * len(some)
            inputs += some
        bounds.append(len(inputs))
    if not inputs:
        return [[] for _ in chunks]
    tokens, not_finite = sample(logits_LV, inputs, places)
    logprobs = _logprobs(logits_LV, tokens, places, num_tops, not_finite)
    choices = [
        Choice(token, logprobs.get(i), i not in not_finite) for i, token in enumerate(tokens)
    ]
    return [choices[first:last] for first, last in pairwise(bounds)]


def _logprobs(
    logits_LV: Logits,
    tokens: SequenceOf[int],
    places: SequenceOf[int],
    num_tops: SequenceOf[int | None],
    not_finite: set[int],
) -> dict[int, PositionLogprobs]:
    """Of the tokens whose requests ask for logprobs."""
    asked = [i for i, num in enumerate(num_tops) if num is not None and i not in not_finite]
    if not asked:
        return {}
    reports = position_logprobs(
        logits_LV,
        [tokens[i] for i in asked],
        [num_tops[i] or 0 for i in asked],
        [places[i] for i in asked],
    )
    return dict(zip(asked, reports, strict=True))


def _rank(
    logits_LV: Logits, chunks: SequenceOf[ScheduledChunk], firsts: SequenceOf[int]
) -> tuple[dict[str, list[Continuation]], set[str]]:
    """Each beam of a search has a chunk; before the first token all have one together. Also those
    requests whose logits weren't finite."""
    searches: dict[Search, list[int]] = {}
    for place, each in enumerate(chunks):
        if each.group.search is not None and each.to_sample:
            searches.setdefault(each.group.search, []).append(firsts[place + 1] - 1)
    if not searches:
        return {}, set()
    places = [index for indices in searches.values() for index in indices]
    names = [search.request.request_id for search in searches]
    owners = [search.request.request_id for search in searches for _ in searches[search]]
    ranked, not_finite = rank(logits_LV, list(searches), places)
    return dict(zip(names, ranked, strict=True)), {owners[i] for i in not_finite}


def _split(hidden_MD: Hidden, chunks: SequenceOf[ScheduledChunk]) -> list[Hidden]:
    if not len(hidden_MD):
        return [hidden_MD] * len(chunks)
    firsts = accumulate((len(each.chunk.hidden_at) for each in chunks), initial=0)
    return [hidden_MD[first:last] for first, last in pairwise(firsts)]


def _is_scored(each: ScheduledChunk) -> bool:
    is_asked = each.sequence.request.prompt_logprobs is not None
    return is_asked and not each.group.is_forked and bool(each.chunk.logits_at)


def _are_finite(reports: SequenceOf[PositionLogprobs]) -> bool:
    return all(each.logprob is None or math.isfinite(each.logprob) for each in reports)
