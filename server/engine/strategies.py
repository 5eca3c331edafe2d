"""What differs between the kinds of requests: generation, beam search, pooling.

Knows: one request, what a step computed for it, the blocks of its sequences.
Does not know: the other requests, who runs when, the model, threads.

Each strategy is a sequence group with the same interface. The scheduler asks it which sequences
prefill or decode and what they need of the model; after the step it updates its sequences and
publishes events.
"""

from collections.abc import Sequence as SequenceOf
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quill.server.engine.block_pool import BlockTables
from quill.server.engine.model_runner import Chunk
from quill.server.engine.sequence import (
    FINISHED,
    Sequence,
    SequenceGroup,
    SequenceStatus,
    make_sequence,
)
from quill.server.engine.step import Choice, ScheduledChunk, StepOutput
from quill.server.outputs import (
    EmbeddingEvent,
    FinishEvent,
    FinishReason,
    HypothesisEvent,
    PositionLogprobs,
    StartEvent,
    TokenEvent,
)
from quill.server.request import Masks, Request
from quill.server.request import Pooling as PoolingMethod
from quill.server.sampling.beam_search import Search
from quill.server.sampling.native import Hidden, Logits
from quill.server.sampling.sampler import SamplerInput, position_logprobs, sequence_seed

# L logits · V vocabulary · M tokens · D model size


class ChunkOutputs(NamedTuple):
    """What a chunk of a prompt needs of the model."""

    to_sample: SequenceOf[Sequence]
    logits_at: SequenceOf[int]  # after which of the chunk's tokens
    hidden_at: SequenceOf[int] = ()


class Strategy(SequenceGroup):
    """The interface, and what generation and beam search have in common."""

    search: Search | None = None
    decodes_together = False  # all sequences are in the same decode steps
    speculates = False
    first_output = "the first token"  # when the client gets something, in words

    def __init__(self, request: Request, sequences: list[Sequence], blocks: BlockTables) -> None:
        super().__init__(request, sequences)
        self.blocks = blocks

    @property
    def num_seqs(self) -> int:
        """How many of the server's sequences the group takes."""
        return len(self.sequences)

    @property
    def num_growing(self) -> int:
        """Sequences that will need further blocks."""
        return len(self.sequences)

    @property
    def scores_prompt(self) -> bool:
        return self.request.prompt_logprobs is not None

    @property
    def needs_every_token(self) -> bool:
        """Something comes of every token: cached blocks can't replace computing it."""
        return self.scores_prompt

    def max_reusable(self, sequence: Sequence) -> int:
        """How many tokens may come from cached blocks: never a prompt's last one."""
        most = self.prefill_target(sequence) - (not self.is_forked)
        return min(most, self.num_scored) if self.scores_prompt else most

    def prepare(self) -> None:
        """Before the first step."""

    def prefill_target(self, sequence: Sequence) -> int:
        """Up to which token a sequence is prefilled."""
        return sequence.num_tokens - 1 if self.is_forked else len(sequence.prompt_ids)

    def own_sequences(self) -> list[Sequence]:
        """Sequences with blocks of their own; before the fork the first has them for all."""
        return self.sequences if self.is_forked else self.sequences[:1]

    def prefilling(self) -> list[Sequence]:
        return [
            each for each in self.own_sequences() if each.num_computed < self.prefill_target(each)
        ]

    def decoding(self) -> list[Sequence]:
        """Sequences with one token to compute."""
        if not self.is_forked:
            return []
        return [each for each in self.sequences if each.num_computed == each.num_tokens - 1]

    def next_text(self) -> tuple[int, ...] | None:
        """The next text that has no sequence yet; only pooling has any."""
        return None

    def begin_text(self) -> None:
        raise AssertionError("only pooling has further texts")

    def is_open(self, index: int | None) -> bool:
        """Whether an answer, or the request, can still be ended."""
        return index is None or index < self.request.num_sequences

    def start_event(self, now_s: float) -> StartEvent:
        self.started_s = now_s
        return StartEvent(self.request_id, self.num_cached, self.request.source_ids is None)

    def prefill_outputs(self, sequence: Sequence, stop: int) -> ChunkOutputs:
        """What is needed of the tokens from those that are computed up to `stop`."""
        num_tokens = stop - sequence.num_computed
        is_end = self.is_new and stop == self.prefill_target(sequence)
        to_sample = tuple(self.sequences) if is_end and self.request.max_new_tokens else ()
        first = num_tokens - 1 if to_sample else num_tokens
        if self.scores_prompt and not self.is_forked:
            first = min(first, max(0, self.num_scored - sequence.num_computed))
        return ChunkOutputs(to_sample, range(first, num_tokens))

    def sampler_inputs(self, scheduled: ScheduledChunk, masks: Masks | None) -> list[SamplerInput]:
        """One for each token to sample from the chunk's logits."""
        raise NotImplementedError

    def prompt_logprobs(self, chunk: Chunk, logits_LV: Logits) -> list[PositionLogprobs]:
        """Of the tokens that follow those with logits; with the second token, of the first too."""
        prompt_ids, num_tops = self.request.prompt_ids, self.request.prompt_logprobs or 0
        start = chunk.start + chunk.logits_at[0]
        following = prompt_ids[start + 1 : chunk.start + len(chunk.ids) + 1]
        first = [PositionLogprobs(prompt_ids[0], None, ())] if start == 0 else []
        if not following:
            return first
        tops = [num_tops] * len(following)
        return first + position_logprobs(logits_LV[: len(following)], following, tops)

    def update(self, scheduled: ScheduledChunk, place: int, output: StepOutput) -> None:
        """After a step, for the chunk at one place of the step."""
        if scheduled.is_prefill:
            sequence = scheduled.sequence
            self.is_encoded = bool(self.source_blocks)
            self.blocks.set_computed(sequence, sequence.num_computed + len(scheduled.chunk.ids))
            self.num_scored = max(self.num_scored, sequence.num_computed)
            if self.is_forked or sequence.num_computed < self.prefill_target(sequence):
                return
            self.is_forked = True
            self.blocks.fork(self.sequences, [0] * len(self.sequences))
            if self.is_new:
                self.update_first(output.choices[place], output)
        else:
            self.update_decode(scheduled, output.choices[place], output)

    def update_first(self, choices: SequenceOf[Choice], output: StepOutput) -> None:
        """The prompt is computed, and each sequence may have its first token."""
        raise NotImplementedError

    def update_decode(
        self, scheduled: ScheduledChunk, choices: SequenceOf[Choice], output: StepOutput
    ) -> None:
        raise NotImplementedError

    def end_step(self, output: StepOutput) -> None:
        """After the updates of all chunks from which tokens were sampled."""

    def finish_event(self, sequence: Sequence, reason: FinishReason, now_s: float) -> FinishEvent:
        usage = self.usage(
            len(sequence.token_ids), sequence.num_draft_tokens, sequence.num_accepted
        )
        return FinishEvent(
            self.request_id, sequence.index, reason, sequence.seed, usage, self.timings(now_s)
        )


class Generation(Strategy):
    """Samples each answer by itself."""

    def __init__(self, request: Request, context: int, blocks: BlockTables) -> None:
        indices = range(request.num_sequences)
        sequences = [make_sequence(request, index, context) for index in indices]
        super().__init__(request, sequences, blocks)
        self.speculates = not request.sampling.adjusts

    def prepare(self) -> None:
        for sequence in self.sequences:
            sequence.prepare(self.grammar)

    def is_open(self, index: int | None) -> bool:
        return index is None or any(each.index == index for each in self.sequences)

    def sampler_inputs(self, scheduled: ScheduledChunk, masks: Masks | None) -> list[SamplerInput]:
        """After a prompt, one for each sequence; else one for a sequence and each draft token, as
        far as the grammar's masks go."""
        some = repeat(None) if masks is None else masks
        if scheduled.is_prefill:
            (mask,) = islice(some, 1)  # no sequence has a token
            return [sequence.sampler_input(0, mask) for sequence in scheduled.to_sample]
        sequence = scheduled.sequence
        ahead = range(len(scheduled.draft) + 1)
        return [sequence.sampler_input(i, mask) for i, mask in zip(ahead, some, strict=False)]

    def update_first(self, choices: SequenceOf[Choice], output: StepOutput) -> None:
        for place, sequence in enumerate(self.sequences):
            self._append(sequence, choices[place : place + 1], (), output)
            self._finish_if_complete(sequence, output)

    def update_decode(
        self, scheduled: ScheduledChunk, choices: SequenceOf[Choice], output: StepOutput
    ) -> None:
        sequence, draft = scheduled.sequence, scheduled.draft
        num_before = len(sequence.token_ids)
        self._append(sequence, choices, draft, output)
        if draft:
            num_accepted = max(0, len(sequence.token_ids) - num_before - 1)
            if sequence.lookup is not None and not scheduled.is_jump_forward:
                sequence.lookup.learn(len(draft), num_accepted)
            sequence.num_draft_tokens += len(draft)
            sequence.num_accepted += num_accepted
            output.num_accepted += num_accepted
            output.num_jump_forward += num_accepted if scheduled.is_jump_forward else 0
        self.blocks.set_computed(sequence, sequence.num_tokens - 1)
        self._finish_if_complete(sequence, output)

    def _append(
        self,
        sequence: Sequence,
        choices: SequenceOf[Choice],
        draft: SequenceOf[int],
        output: StepOutput,
    ) -> None:
        """A sequence's next token, and those after it as far as the draft tokens are accepted."""
        request_id = self.request.request_id
        for place, (token, logprobs, is_finite) in enumerate(choices):
            if sequence.is_lost:
                output.lost.add(request_id)
                return
            if not is_finite:
                output.not_finite.add(request_id)
                return
            sequence.append(token)
            if self.first_token_s is None:
                self.first_token_s = output.now_s
            output.events.append(TokenEvent(request_id, sequence.index, token, logprobs))
            is_accepted = place < len(draft) and draft[place] == token
            if not is_accepted or sequence.finish_reason() is not None:
                return

    def _finish_if_complete(self, sequence: Sequence, output: StepOutput) -> None:
        reason = sequence.finish_reason()
        if reason is not None:
            sequence.transition(FINISHED[reason])
            output.finished.append(sequence)
            output.events.append(self.finish_event(sequence, reason, output.now_s))


class BeamSearch(Strategy):
    """Each sequence is a beam; the answers come together, when the search is over."""

    decodes_together = True
    first_output = "the search was over"

    def __init__(self, request: Request, context: int, blocks: BlockTables) -> None:
        assert request.beams is not None
        sequences = [
            make_sequence(request, index, context) for index in range(request.beams.num_beams)
        ]
        super().__init__(request, sequences, blocks)
        self.search: Search = Search(request, sequences[0].max_tokens)

    def decoding(self) -> list[Sequence]:
        decoding = super().decoding()
        return decoding if len(decoding) == len(self.sequences) else []

    def sampler_inputs(self, scheduled: ScheduledChunk, masks: Masks | None) -> list[SamplerInput]:
        return []  # beams are ranked

    def update_first(self, choices: SequenceOf[Choice], output: StepOutput) -> None:
        pass

    def update_decode(
        self, scheduled: ScheduledChunk, choices: SequenceOf[Choice], output: StepOutput
    ) -> None:
        self.blocks.set_computed(scheduled.sequence, scheduled.sequence.num_tokens)

    def end_step(self, output: StepOutput) -> None:
        """Sequence i follows the i-th best beam."""
        search, request = self.search, self.request
        parents = search.advance(output.continuations[self.request_id])
        num_needed = request.num_sequences if search.is_over else len(self.sequences)
        if len(search.answers if search.is_over else parents) < num_needed:
            output.not_finite.add(self.request_id)  # too few tokens have finite logits
        elif search.is_over:
            self._publish(output)
        else:
            self.blocks.fork(self.sequences, parents)
            for sequence, beam in zip(self.sequences, search.running, strict=True):
                sequence.token_ids = list(beam.token_ids)

    def _publish(self, output: StepOutput) -> None:
        name, request = self.request_id, self.request
        self.first_token_s = output.now_s
        answers = self.search.answers[: request.num_sequences]
        for index, (beam, score, reason) in enumerate(answers):
            seed = sequence_seed(request.seed, index)
            usage, timings = self.usage(len(beam.token_ids)), self.timings(output.now_s)
            output.events += (
                HypothesisEvent(name, index, beam.token_ids, beam.reports),
                FinishEvent(name, index, reason, seed, usage, timings, score),
            )
        for sequence in self.sequences:
            sequence.transition(FINISHED[answers[0].reason])
        output.finished += self.sequences


class Pooling(Strategy):
    """Computes texts that aren't continued: for an embedding of each, or for what masks stand for.

    A text has a sequence while it is computed; there is always one.
    """

    first_output = "all texts were read"

    def __init__(self, request: Request, context: int, blocks: BlockTables) -> None:
        super().__init__(request, [], blocks)
        assert request.pooling is not None
        self._params = request.pooling
        self._num_begun = 0
        self._poolers: dict[Sequence, Pooler] = {}
        self.begin_text()

    @property
    def num_seqs(self) -> int:
        return 1  # texts end soon

    @property
    def num_growing(self) -> int:
        return 0

    @property
    def scores_prompt(self) -> bool:
        return False  # only masks have logprobs

    @property
    def needs_every_token(self) -> bool:
        return True

    def max_reusable(self, sequence: Sequence) -> int:
        pooler = self._poolers.get(sequence)
        num_seen = self.num_scored if pooler is None else pooler.num_seen
        return min(super().max_reusable(sequence), num_seen)

    def own_sequences(self) -> list[Sequence]:
        return self.sequences

    def next_text(self) -> tuple[int, ...] | None:
        texts = self._params.texts
        return texts[self._num_begun] if self._num_begun < len(texts) else None

    def begin_text(self) -> None:
        text, index, params = self.next_text(), self._num_begun, self._params
        assert text is not None
        sequence = Sequence(self.request, index, text, 0, 0)
        if self.sequences:  # they run
            sequence.transition(SequenceStatus.RUNNING)
        self.sequences.append(sequence)
        if not params.masks:
            of = params.ranges[index] if params.ranges else range(len(text))
            self._poolers[sequence] = Pooler(params.method, of)
        self._num_begun += 1

    def start_event(self, now_s: float) -> StartEvent:
        self.started_s = now_s
        return StartEvent(self.request_id, self.num_cached, was_looked_up=False)

    def prefill_outputs(self, sequence: Sequence, stop: int) -> ChunkOutputs:
        pooler, start = self._poolers.get(sequence), sequence.num_computed
        places = () if pooler is None else pooler.needed(start, stop)
        return ChunkOutputs((), self._params.masks, [place - start for place in places])

    def prompt_logprobs(self, chunk: Chunk, logits_LV: Logits) -> list[PositionLogprobs]:
        masks = [chunk.ids[place] for place in chunk.logits_at]
        tops = [self.request.prompt_logprobs or 0] * len(masks)
        return position_logprobs(logits_LV, masks, tops)

    def update(self, scheduled: ScheduledChunk, place: int, output: StepOutput) -> None:
        sequence, pooler = scheduled.sequence, self._poolers.get(scheduled.sequence)
        self.blocks.set_computed(sequence, sequence.num_computed + len(scheduled.chunk.ids))
        if pooler is not None:
            pooler.add(output.hidden[place], sequence.num_computed)
        if sequence.num_computed < self.prefill_target(sequence):
            return
        if pooler is not None:
            embedding_D = pooler.embedding_D()
            if not np.isfinite(embedding_D).all():
                output.not_finite.add(self.request_id)
                return
            output.events.append(EmbeddingEvent(self.request_id, sequence.index, embedding_D))
            del self._poolers[sequence]
        sequence.transition(SequenceStatus.FINISHED_LENGTH)
        output.finished.append(sequence)
        if any(each.status is SequenceStatus.RUNNING for each in self.sequences):
            return
        if self.next_text() is not None:
            self.begin_text()
        else:
            usage, timings = self.usage(0), self.timings(output.now_s)
            seed = self.request.seed
            output.events.append(FinishEvent(self.request_id, 0, "length", seed, usage, timings))


class Pooler:
    """One text's embedding, as the hidden states of its tokens come: in order, but some may come
    again. `num_seen` have come.

    A mean is added up in float64, strictly one token after another: so it is the same bits wherever
    the text was cut into chunks.
    """

    def __init__(self, method: PoolingMethod, of: range) -> None:
        self._of = {"mean": of, "first": of[:1], "last": of[-1:]}[method]
        self._sum_D: npt.NDArray[np.float64] | None = None
        self.num_seen = 0

    def needed(self, start: int, stop: int) -> range:
        """The tokens of a chunk whose hidden states are needed."""
        start = max(start, self.num_seen, self._of.start)
        return range(start, max(start, min(stop, self._of.stop)))

    def add(self, hidden_MD: Hidden, stop: int) -> None:
        """The hidden states that were needed of the tokens up to `stop`."""
        self.num_seen = max(self.num_seen, stop)
        if not len(hidden_MD):
            return
        rows_MD = hidden_MD.astype(np.float64)
        if self._sum_D is not None:
            rows_MD = np.concatenate([self._sum_D[None], rows_MD])
        # `sum` may add in another order; `accumulate` can't.
        self._sum_D = np.add.accumulate(rows_MD, axis=0)[-1]

    def embedding_D(self) -> Hidden:
        """Once all of the text was computed."""
        assert self._sum_D is not None
        return (self._sum_D / len(self._of)).astype(np.float32)


def make_group(request: Request, context: int, blocks: BlockTables) -> Strategy:
    """The request's sequence group, by its kind."""
    if request.pooling is not None:
        return Pooling(request, context, blocks)
    kind = Generation if request.beams is None else BeamSearch
    return kind(request, context, blocks)
