"""Chunked prefill: how many tokens of which prompts a step computes.

Knows: sequences in prefill, what tokens cost, which blocks are cached. Does not know: the queue.

Prompts are prefilled side by side. Owners have equal shares of the time, and so have the prompts of
one owner; a short prompt is done before a long one's next chunk. This is self-clocked fair queueing
of owners, and of each owner's prompts, over chunks of QUANTUM tokens: whose virtual finish time is
the earliest is served, and virtual clocks advance to it. Several texts of one request count as one
prompt, and are computed in order. Of those that prefill the same prefix at once, one computes it
and the others wait for its blocks.
"""

import heapq
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from quill.server.engine.block_pool import BlockTables, PrefixHash
from quill.server.engine.sequence import Sequence
from quill.server.engine.step_budget import MIN_CHUNK, StepBudget
from quill.server.engine.strategies import Strategy
from quill.server.request import Limits

QUANTUM = 256
# Logits are needed of every token of prompts that are scored: 64 x 49,152 of them are 12 MB.
MAX_LOGPROBS_TOKENS = 64


@dataclass
class _Owner:
    virtual_time: float  # among the owners
    clock: float  # the latest virtual time of its prompts


class VirtualClocks:
    """The virtual times of owners and of their prompts, from step to step."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._clock = 0.0  # the latest virtual time of the owners

    def enter(self, group: Strategy) -> None:
        """A prompt has no claim on what was computed before it came."""
        group.virtual_time = self._owner(group).clock

    def catch_up(self, group: Strategy) -> None:
        """A prompt gets no lead from what other prompts computed for it."""
        group.virtual_time = max(group.virtual_time, self._owner(group).clock)

    def owner_finish(self, owner: str, cost_s: float) -> float:
        """The owner's virtual time after its next chunk."""
        return self._owners[owner].virtual_time + cost_s

    def charge(self, group: Strategy, cost_s: float) -> None:
        owner = self._owner(group)
        group.virtual_time += cost_s
        owner.virtual_time += cost_s
        owner.clock = max(owner.clock, group.virtual_time)
        self._clock = max(self._clock, owner.virtual_time)

    def keep_only(self, owners: set[str]) -> None:
        """Forgets owners without prompts to prefill."""
        self._owners = {name: each for name, each in self._owners.items() if name in owners}

    def _owner(self, group: Strategy) -> _Owner:
        name = group.request.owner
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = _Owner(self._clock, 0.0)
        return owner


class PrefillScheduler:
    """Shares each step's time for prompts among the groups that prefill."""

    def __init__(self, blocks: BlockTables, budget: StepBudget, limits: Limits) -> None:
        self._blocks = blocks
        self._budget = budget
        self._limits = limits
        self._clocks = VirtualClocks()

    def enter(self, group: Strategy) -> None:
        self._clocks.enter(group)

    def schedule(self, groups: SequenceOf[Strategy], num_decoding: int) -> dict[Sequence, int]:
        """How many tokens each sequence prefills in the next step. The first group is the oldest.

        Sequences first adopt the cached blocks of their prefix. Whose next block comes from the
        disk waits for it.
        """
        groups_of = {sequence: group for group in groups for sequence in group.prefilling()}
        ready = {
            sequence: group
            for sequence, group in groups_of.items()
            if not self._find_prefix(group, sequence)
        }
        chunk_sizes: dict[Sequence, int] = {}
        if ready:
            step = _PrefillStep(
                self._blocks, self._budget, self._limits, self._clocks, groups[0], ready
            )
            chunk_sizes = step.share(num_decoding)
        self._clocks.keep_only(
            {group.request.owner for group in groups_of.values() if group.prefilling()}
        )
        return chunk_sizes

    def _find_prefix(self, group: Strategy, sequence: Sequence) -> bool:
        """Whether more of it comes."""
        if group.request.source_ids is not None:
            return False
        most = group.max_reusable(sequence)
        if self._blocks.adopt_prefix(sequence, most):
            self._clocks.catch_up(group)
        return self._blocks.load_prefix(sequence, most)


class _PrefillStep:
    """One step's chunks."""

    def __init__(
        self,
        blocks: BlockTables,
        budget: StepBudget,
        limits: Limits,
        clocks: VirtualClocks,
        oldest: Strategy,
        groups: dict[Sequence, Strategy],
    ) -> None:
        self._blocks, self._budget, self._limits, self._clocks = blocks, budget, limits, clocks
        self._size = blocks.block_size
        self._oldest = oldest
        self._groups = groups
        self._left_s = 0.0
        self._left = limits.max_prefill_tokens
        self._num_free = blocks.pool.num_free
        num_scored = sum(group.scores_prompt for group in groups.values())
        self._max_scored = max(1, MAX_LOGPROBS_TOKENS // max(1, num_scored))
        self._given: dict[Sequence, int] = {}
        self._writers: dict[PrefixHash, Sequence] = {}  # who computes each block that is next
        self._waits: set[Sequence] = set()  # for others' blocks

    def share(self, num_decoding: int) -> dict[Sequence, int]:
        sequences_of: dict[Strategy, deque[Sequence]] = {}
        for sequence, group in self._groups.items():
            if group.request.source_ids is None:
                self._claim(sequence)
            sequences_of.setdefault(group, deque()).append(sequence)
        num_short = sum(self._needed(each[0]) <= QUANTUM for each in sequences_of.values())
        self._left_s = self._budget.prefill_s(num_decoding, num_short)
        if not self._left_s:
            return {}
        lines: dict[str, list[tuple[float, int, deque[Sequence]]]] = {}
        for place, (group, line) in enumerate(sequences_of.items()):
            entry = (self._virtual_finish(line[0]), place, line)
            lines.setdefault(group.request.owner, []).append(entry)
        for entries in lines.values():
            heapq.heapify(entries)
        while lines and self._left > 0 and (self._left_s > 0 or not self._given):
            name = min(lines, key=lambda name: self._owner_finish(name, lines[name][0][2][0]))
            _, place, line = heapq.heappop(lines[name])
            self._serve(line)
            if line:
                heapq.heappush(lines[name], (self._virtual_finish(line[0]), place, line))
            if not lines[name]:
                del lines[name]
        return self._given

    def _serve(self, line: deque[Sequence]) -> None:
        """A chunk for the first of a request's sequences. Who gets nothing more leaves the line."""
        is_given = self._give(line[0])
        if not is_given and self._limits.whole_prompts:
            line.clear()  # shorter texts that come later mustn't fill its place for ever
        elif not is_given or not self._needed(line[0]):
            line.popleft()

    def _needed(self, sequence: Sequence) -> int:
        target = self._groups[sequence].prefill_target(sequence)
        return target - sequence.num_computed - self._given.get(sequence, 0)

    def _virtual_finish(self, sequence: Sequence) -> float:
        """The prompt's virtual time after its next chunk."""
        cost_s = self._cost_s(sequence, self._quantum(sequence))
        return self._groups[sequence].virtual_time + cost_s

    def _owner_finish(self, owner: str, sequence: Sequence) -> float:
        return self._clocks.owner_finish(owner, self._cost_s(sequence, self._quantum(sequence)))

    def _quantum(self, sequence: Sequence) -> int:
        """The largest chunk before it is another prompt's turn."""
        needed = self._needed(sequence)
        return needed if self._limits.whole_prompts else min(needed, QUANTUM)

    def _cost_s(self, sequence: Sequence, num_tokens: int) -> float:
        past = sequence.num_computed + self._given.get(sequence, 0)
        return self._budget.cost_s(num_tokens, past) + self._source_s(sequence)

    def _source_s(self, sequence: Sequence) -> float:
        """What the encoder takes, if it has to come first."""
        group = self._groups[sequence]
        if not group.source_blocks or group.is_encoded or sequence in self._given:
            return 0.0
        return self._budget.cost_s(group.request.num_prompt, 0)

    def _give(self, sequence: Sequence) -> bool:
        """The next chunk. False: the sequence gets nothing more in this step."""
        num_tokens = self._num_possible(sequence)
        group = self._groups[sequence]
        if num_tokens <= 0 or (sequence in self._waits and group is not self._oldest):
            return False
        cost_s = self._cost_s(sequence, num_tokens)
        self._clocks.charge(group, cost_s)
        self._left_s -= cost_s
        self._left -= num_tokens
        if self._source_s(sequence):
            self._left -= group.request.num_prompt
        self._num_free = max(0, self._num_free - -(-num_tokens // self._size))
        self._given[sequence] = self._given.get(sequence, 0) + num_tokens
        return True

    def _num_possible(self, sequence: Sequence) -> int:
        if self._limits.whole_prompts:
            return self._num_of_whole(sequence)
        group, given = self._groups[sequence], self._given.get(sequence, 0)
        affordable = self._budget.num_affordable(self._left_s, sequence.num_computed + given)
        if not self._given:
            affordable = max(affordable, MIN_CHUNK)
        num_tokens = min(affordable, self._quantum(sequence), self._left)
        if group.scores_prompt:
            num_tokens = min(num_tokens, self._max_scored - given)
        if self._limits.one_token_steps:
            num_tokens = min(num_tokens, 1 - given)
        if self._given and self._source_s(sequence) > self._left_s:
            return 0
        if group is not self._oldest:  # no other group may preempt
            num_places = (len(sequence.blocks) + self._num_free) * self._size
            num_tokens = min(num_tokens, num_places - sequence.num_computed - given)
        return num_tokens

    def _num_of_whole(self, sequence: Sequence) -> int:
        """All or nothing. The first chunk may be larger than a step should take."""
        num_tokens = self._needed(sequence)
        is_short = num_tokens <= self._left and self._cost_s(sequence, num_tokens) <= self._left_s
        return num_tokens if not self._given or (is_short and self._num_free) else 0

    def _claim(self, sequence: Sequence) -> None:
        """Of those that compute the same block next, the one furthest in it goes on; or the
        oldest."""
        group, place = self._groups[sequence], sequence.num_computed // self._size
        target = group.prefill_target(sequence)
        if group.needs_every_token or (place + 1) * self._size > target:
            return
        key = self._blocks.prefix_hash(sequence, place)
        if key is None:
            return
        other = self._writers.setdefault(key, sequence)
        if other.num_computed < sequence.num_computed:
            self._writers[key] = sequence
            self._waits.add(other)
        elif other is not sequence:
            self._waits.add(sequence)
