"""One step as two records: what to run (SchedulerOutput), and what came of it (StepOutput).

Knows: sequences, blocks as numbers. Does not know: why they were chosen, how they are run.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from quill.server.engine.model_runner import BlockCopy, Chunk, Source
from quill.server.engine.sequence import Sequence
from quill.server.outputs import Event, PositionLogprobs, StepKind
from quill.server.sampling.beam_search import Continuation
from quill.server.sampling.native import Hidden

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
