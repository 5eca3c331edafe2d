"""One sequence with its status, and what the sequences of one request have in common.

Knows: a request, its tokens, blocks as numbers, times that it is given, when a sequence ends.
Does not know: the other requests, steps, clocks. What differs between generation, beam search and
pooling is in server/engine/strategies.py.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import get_args

from quill.server.engine.speculation import PromptLookup
from quill.server.outputs import FinishReason, Timings, Usage
from quill.server.request import Grammar, Masks, Matcher, Request
from quill.server.sampling.native import Mask
from quill.server.sampling.sampler import Adjustments, SamplerInput, sequence_seed


class SequenceStatus(Enum):
    """Where a sequence is in its life. All sequences of a group wait, run or are preempted
    together; each finishes by itself."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOP = "finished: stop"
    FINISHED_EOS = "finished: eos"
    FINISHED_LENGTH = "finished: length"
    FINISHED_CANCELLED = "finished: cancelled"
    FINISHED_DEADLINE = "finished: deadline"
    FAILED = "failed"


FINISHED: dict[FinishReason, SequenceStatus] = {
    reason: SequenceStatus(f"finished: {reason}") for reason in get_args(FinishReason)
}
_ENDED_EARLY = (
    SequenceStatus.FINISHED_CANCELLED,
    SequenceStatus.FINISHED_DEADLINE,
    SequenceStatus.FAILED,
)
# ARCHITECTURE.md shows these as a diagram.
TRANSITIONS: dict[SequenceStatus, tuple[SequenceStatus, ...]] = {
    SequenceStatus.WAITING: (SequenceStatus.RUNNING, *_ENDED_EARLY),
    SequenceStatus.RUNNING: (
        SequenceStatus.PREEMPTED,
        SequenceStatus.FINISHED_STOP,
        SequenceStatus.FINISHED_EOS,
        SequenceStatus.FINISHED_LENGTH,
        *_ENDED_EARLY,
    ),
    # The frontend may find a stop string in what a preempted sequence generated before.
    SequenceStatus.PREEMPTED: (
        SequenceStatus.RUNNING,
        SequenceStatus.FINISHED_STOP,
        *_ENDED_EARLY,
    ),
}


@dataclass(eq=False, slots=True)
class Sequence:
    """One of a request's answers, one beam of its search, or one of its texts to pool. Two
    sequences are never equal, whatever tokens they have."""

    request: Request
    index: int  # which of the request's answers, beams or texts, from 0
    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    status: SequenceStatus = SequenceStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    adjustments: Adjustments | None = None  # None: neither sampling nor min_new_tokens need them
    matcher: Matcher | None = None  # how far the answer has come in its grammar
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose keys and values are in the blocks
    num_cached_blocks: int = 0  # the first of the blocks, which other sequences can find
    lookup: PromptLookup | None = None
    num_draft_tokens: int = 0
    num_accepted: int = 0

    def transition(self, status: SequenceStatus) -> None:
        allowed = TRANSITIONS.get(self.status, ())
        assert status in allowed, f"{self.status.name} can't become {status.name}"
        self.status = status

    def prepare(self, grammar: Grammar | None) -> None:
        """Before the first step: the grammar's matcher, and what adjusts logits."""
        request = self.request
        assert (grammar is None) == (request.constraint is None), "EngineThread compiles it"
        if grammar is not None:
            self.matcher = grammar.matcher()
        # A grammar's masks forbid the stop ids where they can.
        bans = request.min_new_tokens and self.matcher is None
        banned = request.all_stop_ids if bans else frozenset()
        if request.sampling.adjusts or banned:
            self.adjustments = Adjustments(
                request.sampling, request.prompt_ids, self.max_tokens, banned
            )

    @property
    def num_tokens(self) -> int:
        """Of the prompt and of the answer so far."""
        return len(self.prompt_ids) + len(self.token_ids)

    def ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Some tokens of the prompt and of the answer so far."""
        prompt = self.prompt_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        return (*prompt[start:], *self.token_ids[max(0, start - len(prompt)) : stop - len(prompt)])

    def sampler_input(self, ahead: int = 0, mask: Mask | None = None) -> SamplerInput:
        """What the next token depends on, or the one after so many draft tokens."""
        sampling, position = self.request.sampling, len(self.token_ids) + ahead
        is_adjusted = sampling.adjusts or position < self.request.min_new_tokens
        adjustments = self.adjustments if is_adjusted else None
        return SamplerInput(sampling, self.seed, position, adjustments, mask)

    def masks(self, draft: list[int]) -> Masks:
        """The tokens that the grammar allows next, and after each of the draft tokens."""
        assert self.matcher is not None
        num_unended = self.request.min_new_tokens - len(self.token_ids)
        return self.matcher.masks(draft, self.request.all_stop_ids, num_unended)

    @property
    def is_lost(self) -> bool:
        """The grammar became too complex to follow."""
        return self.matcher is not None and self.matcher.has_failed

    def append(self, token: int) -> None:
        self.token_ids.append(token)
        request = self.request
        if self.adjustments is not None and request.sampling.adjusts:
            self.adjustments.add(token)
            if len(self.token_ids) == request.min_new_tokens and self.matcher is None:
                self.adjustments.allow(request.all_stop_ids)
        if self.matcher is not None and token not in request.all_stop_ids:
            self.matcher.accept(token)
        if self.lookup is not None:
            self.lookup.append(token)

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence is complete; None while it isn't."""
        return self.request.finish_reason(self.token_ids, self.max_tokens)


class SequenceGroup:
    """A request and its unfinished sequences, from its arrival to its end.

    The first sequence computes the prompt; then all continue from its blocks. After a preemption
    the prompt is computed again, and then each sequence's tokens but the last, which is computed
    by the next decode.
    """

    def __init__(self, request: Request, sequences: list[Sequence]) -> None:
        self.request = request
        self.sequences = sequences  # never empty before the request's end
        self.arrived_s = 0.0
        self.grammar: Grammar | None = None  # of the request's constraint
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.has_started = False  # some of the prompt was scheduled
        self.source_blocks: list[int] = []
        self.is_encoded = False
        self.is_forked = False  # the prompt is computed, and all sequences have its blocks
        self.num_cached = 0  # tokens of the prompt that the prefix cache had, at the start
        self.num_scored = 0  # tokens of the prompt whose logprobs were reported
        self.num_overtaken = 0  # tokens of requests that started earlier and came later
        self.virtual_time = 0.0  # of its prefill, among the prompts of its owner

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def status(self) -> SequenceStatus:
        return self.sequences[0].status

    def transition(self, status: SequenceStatus) -> None:
        for sequence in self.sequences:
            sequence.transition(status)

    @property
    def is_new(self) -> bool:
        """No sequence has a token: the logits after the prompt are needed."""
        return not self.sequences[0].token_ids

    def drop_blocks(self) -> list[list[int]]:
        """Preemption: nothing is computed any more. Returns the blocks, sequence by sequence."""
        dropped = [sequence.blocks for sequence in self.sequences] + [self.source_blocks]
        for sequence in self.sequences:
            sequence.blocks, sequence.num_computed, sequence.num_cached_blocks = [], 0, 0
        self.source_blocks, self.is_encoded = [], False
        self.is_forked = len(self.sequences) == 1 and not self.is_new
        return dropped

    def usage(self, num_generated: int, num_draft_tokens: int = 0, num_accepted: int = 0) -> Usage:
        prompt = self.request.num_prompt
        return Usage(prompt, self.num_cached, num_generated, num_draft_tokens, num_accepted)

    def timings(self, now_s: float) -> Timings:
        def since_arrival_ms(moment_s: float | None) -> float:
            return 0.0 if moment_s is None else 1000 * (moment_s - self.arrived_s)

        return Timings(
            queue_ms=since_arrival_ms(self.started_s),
            first_token_ms=since_arrival_ms(self.first_token_s),
            total_ms=since_arrival_ms(now_s),
        )


def make_sequence(request: Request, index: int, context: int) -> Sequence:
    """Prompt and answer together fit into the context."""
    max_tokens = min(request.max_new_tokens, context - len(request.prompt_ids))
    seed = sequence_seed(request.seed, index)
    return Sequence(request, index, request.prompt_ids, max_tokens, seed)
