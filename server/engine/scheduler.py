"""Chooses what runs in the next step, and keeps the table of who waits, runs or is preempted.

Knows: lengths, blocks, the time that a step may take. Does not know: text, ONNX, gRPC, threads.

First requests are admitted to the running set: all that find sequences and blocks, in the order of
the fair queue (server/engine/fair_queue.py). One that finds none may be overtaken, by its own cost
at most. A step decodes all running sequences, with draft tokens where they pay
(server/engine/speculation.py), and beside them prefills chunks of prompts
(server/engine/prefill.py). Blocks are taken when they are written. If none is left, the request
that started last is preempted: it loses all its blocks, waits before the queue, and is recomputed
later, to continue with the same tokens. So the request that started first always advances.
"""

from collections.abc import Sequence as SequenceOf

from quill.server.engine.block_pool import BlockTables, DiskCache
from quill.server.engine.fair_queue import FairQueue, cost
from quill.server.engine.model_runner import BlockCopy, Chunk
from quill.server.engine.prefill import PrefillScheduler
from quill.server.engine.sequence import Sequence, SequenceStatus
from quill.server.engine.speculation import Speculation
from quill.server.engine.step import ScheduledChunk, SchedulerOutput, StepOutput
from quill.server.engine.step_budget import ChunkSize, StepBudget
from quill.server.engine.strategies import Strategy, make_group
from quill.server.outputs import DiskCacheStats
from quill.server.request import Grammar, Limits, Request

LOOK_AHEAD = 64  # waiting requests that may start before a step
WAITING, RUNNING, PREEMPTED = (
    SequenceStatus.WAITING,
    SequenceStatus.RUNNING,
    SequenceStatus.PREEMPTED,
)


class Scheduler:
    """The table of all unfinished requests, and the policies that move them."""

    def __init__(self, limits: Limits, disk: DiskCache | None = None) -> None:
        self._limits = limits
        # By status, then by request id. Running: in the order of their starts; preempted: in the
        # order of their preemptions.
        self._groups: dict[SequenceStatus, dict[str, Strategy]] = {
            WAITING: {},
            RUNNING: {},
            PREEMPTED: {},
        }
        self._queue = FairQueue()
        self._blocks = BlockTables(limits, disk)
        self._budget = StepBudget()
        self._prefill = PrefillScheduler(self._blocks, self._budget, limits)
        self._speculation = Speculation(limits, self._budget, self._blocks)
        self.num_preempted = 0  # so far

    @property
    def num_waiting(self) -> int:
        return len(self._groups[WAITING]) + len(self._groups[PREEMPTED])

    @property
    def num_seqs(self) -> int:
        return sum(group.num_seqs for group in self._groups[RUNNING].values())

    @property
    def num_running(self) -> int:
        """Requests with running sequences."""
        return len(self._groups[RUNNING])

    @property
    def num_blocks_used(self) -> int:
        return self._blocks.pool.num_used

    @property
    def is_empty(self) -> bool:
        return not any(self._groups.values())

    def groups(self, *statuses: SequenceStatus) -> list[Strategy]:
        """Those with one of these statuses; without any, all."""
        return [
            group for status in statuses or self._groups for group in self._groups[status].values()
        ]

    def waiting(self) -> list[Strategy]:
        """The first few, in the order of admission: preempted groups, the oldest first, and then
        those that have never run."""
        groups = [*reversed(self._groups[PREEMPTED].values())]
        in_order = self._queue.in_order(LOOK_AHEAD)
        groups += [self._groups[WAITING][request.request_id] for request in in_order]
        return groups[:LOOK_AHEAD]

    def find(self, request_id: str) -> Strategy | None:
        found = (each[request_id] for each in self._groups.values() if request_id in each)
        return next(found, None)

    def add(self, request: Request, arrived_s: float = 0.0, grammar: Grammar | None = None) -> None:
        assert self._limits.fits(request), "the frontend rejects these"
        fits = request.num_before < self._limits.context
        assert fits or not request.max_new_tokens, "the frontend rejects these"
        assert self.find(request.request_id) is None, "request ids are unique"
        group = make_group(request, self._limits.context, self._blocks)
        group.arrived_s, group.grammar = arrived_s, grammar
        self._groups[WAITING][request.request_id] = group
        self._queue.add(request)

    def remove(self, group: Strategy, status: SequenceStatus, index: int | None = None) -> None:
        """Ends a request, or one of its answers, whatever its status is."""
        gone = [each for each in group.sequences if index in (None, each.index)]
        for sequence in gone:
            sequence.transition(status)
        self._release(group, gone)

    def schedule(self) -> SchedulerOutput | None:
        """The next step. None: there is nothing to run."""
        num_preempted = self.num_preempted
        self._blocks.finish_loads()
        self._admit()
        running = self.groups(RUNNING)
        num_decoding = sum(len(group.decoding()) for group in running)
        chunk_sizes = self._prefill.schedule(running, num_decoding)
        self._speculation.begin_step(num_decoding, self.num_seqs, bool(chunk_sizes))
        output = SchedulerOutput()
        for group in running:
            if group.status is not RUNNING:
                continue  # preempted for a group before it
            self._schedule_decode(group, output)
            for sequence in group.prefilling() if chunk_sizes else ():
                if sequence in chunk_sizes:
                    self._schedule_prefill(group, sequence, chunk_sizes[sequence], output)
        output.num_preempted = self.num_preempted - num_preempted
        if output.decode or output.prefill or output.copies:
            return output
        self._budget.give_up_probe()  # the sequences that should have been alone find no block
        self._blocks.wait_for_load()
        return None

    def observe(self, scheduled: SchedulerOutput, duration_s: float) -> None:
        """Learns from how long a step took."""
        chunks = [ChunkSize(len(each.chunk.ids), each.chunk.start) for each in scheduled.prefill]
        chunks += [ChunkSize(group.request.num_prompt, 0) for group in scheduled.encoding]
        num_draft_tokens = scheduled.num_draft_tokens
        self._budget.observe(duration_s, len(scheduled.decode), num_draft_tokens, chunks)

    def update(self, scheduled: SchedulerOutput, output: StepOutput) -> None:
        """Gives sequences their tokens, publishes events, releases what has finished."""
        chunks = scheduled.chunks
        for place, each in enumerate(chunks):
            each.group.update(each, place, output)
        for group in {each.group: None for each in chunks if each.to_sample and each.group.search}:
            group.end_step(output)
        for each in chunks if output.not_finite else ():
            if each.group.request_id in output.not_finite:
                self._blocks.forget(each.sequence.blocks)
        for sequence in output.finished:
            self._release(self._groups[RUNNING][sequence.request.request_id], [sequence])

    def take_disk_stats(self) -> DiskCacheStats | None:
        """Since the last call. None: there is no disk cache."""
        return self._blocks.take_disk_stats()

    def close(self) -> None:
        self._blocks.close()

    # Admission to the running set.

    def _admit(self) -> None:
        """Starts all requests that find sequences and blocks, and continues preempted ones."""
        waiting = self.waiting()
        running = self._groups[RUNNING].values()
        if not waiting and not any(group.next_text() is not None for group in running):
            return
        num_spare = self._blocks.pool.num_free - sum(map(self._num_missing, running))
        first: Strategy | None = None  # that finds no place
        for group in waiting:
            num_overtaken = 0
            if first is not None:
                num_overtaken = first.num_overtaken + cost(group.request)
                if num_overtaken > cost(first.request):
                    continue
            if self._has_room(group, num_spare):
                self._start(group)
                num_spare -= len(group.source_blocks) + self._num_missing(group)
                if first is not None:
                    first.num_overtaken = num_overtaken
            elif first is None:
                first = group
        if first is not None:
            num_spare -= self._limits.num_blocks_of(first.request, 1)
        self._begin_texts(num_spare)

    def _begin_texts(self, num_spare: int) -> None:
        """Further texts of pooling requests: as many as a step could compute and none waits for."""
        for group in self._groups[RUNNING].values() if num_spare > 0 else ():
            num_left = sum(each.num_tokens - each.num_computed for each in group.sequences)
            while (text := group.next_text()) is not None:
                num_blocks = -(-len(text) // self._limits.block_size)
                num_left += len(text)
                if num_blocks > num_spare or num_left > self._limits.max_prefill_tokens:
                    break
                group.begin_text()
                num_spare -= num_blocks

    def _num_missing(self, group: Strategy) -> int:
        """Blocks needed soon: for the rest of the prompt, and one more for each sequence."""
        size = self._limits.block_size
        missing = (-(-each.num_tokens // size) - len(each.blocks) for each in group.own_sequences())
        return group.num_growing + sum(max(0, each) for each in missing)

    def _has_room(self, group: Strategy, num_spare: int) -> bool:
        if self.num_seqs + group.num_seqs > self._limits.max_num_seqs:
            return False
        if not self._groups[RUNNING]:
            return True
        request = group.request
        num_tokens = max(len(sequence.token_ids) for sequence in group.sequences)
        num_needed = self._limits.num_blocks_of(request, num_tokens + 1)
        if num_spare < num_needed <= num_spare + request.num_before // self._limits.block_size:
            num_needed -= self._blocks.num_shareable(request)
        return num_needed <= num_spare

    def _start(self, group: Strategy) -> None:
        """For the first time, or again after a preemption."""
        if group.status is WAITING:
            group.prepare()
        self._queue.serve(group.request)
        self._move(group, RUNNING)
        num_blocks = self._limits.num_source_blocks(group.request)
        group.source_blocks = [self._blocks.pool.take() for _ in range(num_blocks)]
        self._prefill.enter(group)

    # A step.

    def _schedule_decode(self, group: Strategy, output: SchedulerOutput) -> None:
        """The sequences that find a block; the beams of a search only if all do."""
        sequences = group.decoding()
        ready = [each for each in sequences if self._make_room(group, each, 1, output)]
        if group.decodes_together and len(ready) < len(sequences):
            return
        for sequence in ready:
            draft: list[int] = []
            is_jump_forward = False
            if group.speculates:
                draft, is_jump_forward = self._speculation.draft(sequence)
            ids = (*sequence.ids(sequence.num_computed, sequence.num_tokens), *draft)
            chunk = _chunk(group, sequence, ids, range(len(ids)))
            output.decode.append(
                ScheduledChunk(chunk, group, sequence, (sequence,), draft, is_jump_forward, False)
            )

    def _schedule_prefill(
        self, group: Strategy, sequence: Sequence, num_tokens: int, output: SchedulerOutput
    ) -> None:
        if not self._make_room(group, sequence, num_tokens, output):
            return
        if not group.has_started:
            group.has_started, group.num_cached = True, sequence.num_computed
            output.started.append(group)
        if group.source_blocks and not group.is_encoded:
            output.encoding.append(group)
        stop = sequence.num_computed + num_tokens
        to_sample, logits_at, hidden_at = group.prefill_outputs(sequence, stop)
        ids = sequence.ids(sequence.num_computed, stop)
        chunk = _chunk(group, sequence, ids, logits_at, hidden_at)
        output.prefill.append(ScheduledChunk(chunk, group, sequence, to_sample, []))

    def _make_room(
        self, group: Strategy, sequence: Sequence, num_tokens: int, output: SchedulerOutput
    ) -> bool:
        """Blocks of its own for a sequence's next tokens. False: it waits for older groups."""
        if self._blocks.needs_copy(sequence):
            if not self._free_block(group):
                return False
            output.copies.append(BlockCopy(*self._blocks.copy_on_write(sequence)))
            output.copying.append(group)
        size = self._limits.block_size
        while len(sequence.blocks) * size < sequence.num_computed + num_tokens:
            if not self._free_block(group):
                return False
            sequence.blocks.append(self._blocks.pool.take())
        return True

    def _free_block(self, group: Strategy) -> bool:
        """Preempts younger groups until a block is free. False: this group is the youngest."""
        while not self._blocks.pool.num_free:
            youngest = next(reversed(self._groups[RUNNING].values()))
            if youngest is group:
                return False
            self._preempt(youngest)
        return True

    def _preempt(self, group: Strategy) -> None:
        """By recompute: the group loses its blocks, and keeps its tokens."""
        for blocks in group.drop_blocks():
            self._blocks.pool.release(blocks)
        self._move(group, PREEMPTED)
        self.num_preempted += 1

    # The table.

    def _move(self, group: Strategy, status: SequenceStatus) -> None:
        del self._groups[group.status][group.request_id]
        group.transition(status)
        self._groups[status][group.request_id] = group

    def _release(self, group: Strategy, gone: list[Sequence]) -> None:
        """Sequences leave their group, and with the last one the group leaves the table."""
        rest = [each for each in group.sequences if each not in gone]
        if rest and group.own_sequences()[0] in gone and len(group.own_sequences()) == 1:
            self._blocks.fork([group.sequences[0], rest[0]], [0, 0])  # it computes for the others
        group.sequences = rest
        for sequence in gone:
            self._blocks.pool.release(sequence.blocks)
        if not rest:
            self._blocks.pool.release(group.source_blocks)
            self._queue.remove(group.request_id)
            for groups in self._groups.values():
                groups.pop(group.request_id, None)


def _chunk(
    group: Strategy,
    sequence: Sequence,
    ids: tuple[int, ...],
    logits_at: SequenceOf[int],
    hidden_at: SequenceOf[int] = (),
) -> Chunk:
    length = len(group.request.source_ids or ())
    return Chunk(
        ids,
        sequence.num_computed,
        sequence.blocks,
        logits_at,
        group.source_blocks,
        length,
        hidden_at,
    )
