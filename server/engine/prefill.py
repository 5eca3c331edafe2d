"""Who reads how much of its prompt in a step.

Knows: rows that are being read, what tokens cost, which blocks are known. Does not know: the queue.

Prompts are read side by side. Owners have equal shares of the time, and so have the prompts of one
owner; a short one is done before a long one's next piece. (This is self-clocked fair queueing, of
owners and of each one's prompts, over pieces of QUANTUM tokens.) Several texts of one request count
as one prompt, and have their turns in order. Of those who read the same
beginning at once, one reads it and the others wait for its blocks.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from quill.server.engine.block_pool import BlockPool, Key
from quill.server.engine.sequence import Group, Row
from quill.server.engine.step_budget import MIN_CHUNK, StepBudget
from quill.server.limits import Limits
from quill.server.request import Request

QUANTUM = 256
# Logits are wanted for every token of such prompts: 64 x 49,152 of them are 12 MB.
MAX_LOGPROBS_TOKENS = 64


@dataclass
class _Owner:
    tag: float  # its turn among the owners
    now: float = 0.0  # the turn of its prompts that was served last


class PromptShares:
    """Remembers from step to step who has had how much."""

    def __init__(self, pool: BlockPool, budget: StepBudget, limits: Limits) -> None:
        self._pool = pool
        self._budget = budget
        self._limits = limits
        self._size = limits.block_size
        self._owners: dict[str, _Owner] = {}
        self._now = 0.0  # the turn of the owners that was served last

    def enter(self, group: Group) -> None:
        """Nobody has a claim on what was read before it came."""
        owner = self._owners.setdefault(group.request.owner, _Owner(self._now))
        group.tag = owner.now

    def share(self, groups: Sequence[Group], num_running: int) -> dict[Row, int]:
        """How many tokens each row reads, for those that read any."""
        readers = {row: group for group in groups for row in group.readers()}
        given = _Step(self, groups[0], readers, num_running).share() if readers else {}
        present = {group.request.owner for group in readers.values() if group.readers()}
        self._owners = {name: self._owners[name] for name in present}
        return given

    def key(self, row: Row, place: int) -> Key | None:
        """What one of a row's blocks is known by. The whole block has to be in its text."""
        if not self._limits.share:
            return None
        tokens = row.ids(place * self._size, (place + 1) * self._size)
        before = row.blocks[place - 1] if place else None
        return self._pool.key(row.request.cache_scope, before, tokens)

    def num_shareable(self, request: Request) -> int:
        """Blocks that somebody holds already, and that its prompt begins with."""
        num, before = 0, None
        if request.prompt_logprobs is not None or request.source_ids is not None:
            return 0  # nor does a request have any that has no prompt
        for start in range(0, len(request.prompt_ids) - self._size, self._size):
            tokens = request.prompt_ids[start : start + self._size]
            before = self._pool.find(self._pool.key(request.cache_scope, before, tokens))
            if before is None:
                break
            num += not self._pool.is_idle(before)
        return num

    def _adopt(self, group: Group, row: Row) -> None:
        """Takes over blocks that are known, instead of reading; but never a prompt's last."""
        most = group.goal(row) - (not group.is_forked)
        if group.needs_all:
            most = min(most, group.num_noted(row))
        while row.num_held + self._size <= most and not row.num_held % self._size:
            place = row.num_held // self._size
            block = self._pool.find(self.key(row, place))
            if block is None:
                return
            self._pool.share([block])
            self._pool.release(row.blocks[place:])
            row.blocks[place:] = [block]
            row.num_held += self._size
            row.num_known = place + 1
            # What another read for it has cost that one its turns: this one gets no lead from it.
            group.tag = max(group.tag, self._owners[row.request.owner].now)


class _Step:
    """The shares of one step."""

    def __init__(
        self, shares: PromptShares, oldest: Group, readers: dict[Row, Group], num_running: int
    ) -> None:
        self._all = shares
        self._budget, self._size = shares._budget, shares._size
        self._num_running = num_running
        self._left_s = 0.0
        self._left = shares._limits.max_read
        self._is_whole = shares._limits.reads_whole
        self._num_free = shares._pool.num_free
        self._oldest = oldest
        self._groups = readers
        num_scored = sum(group.scores for group in self._groups.values())
        self._max_scored = max(1, MAX_LOGPROBS_TOKENS // max(1, num_scored))
        self._given: dict[Row, int] = {}
        self._readers: dict[Key, Row] = {}  # of each block that is read next: who does it
        self._waits: set[Row] = set()  # for others' blocks

    def share(self) -> dict[Row, int]:
        for row, group in self._groups.items():
            if group.request.source_ids is None:
                self._all._adopt(group, row)
                self._claim(row)
        rows_of: dict[Group, deque[Row]] = {}
        for row, group in self._groups.items():
            rows_of.setdefault(group, deque()).append(row)
        num_short = sum(self._wanted(rows[0]) <= QUANTUM for rows in rows_of.values())
        self._left_s = self._budget.prompts_s(self._num_running, num_short)
        if not self._left_s:
            return {}
        lines: dict[str, list[tuple[float, int, deque[Row]]]] = {}
        for place, (group, rows) in enumerate(rows_of.items()):
            lines.setdefault(group.request.owner, []).append((self._finish(rows[0]), place, rows))
        for line in lines.values():
            heapq.heapify(line)
        while lines and self._left > 0 and (self._left_s > 0 or not self._given):
            name = min(lines, key=lambda name: self._owner_finish(name, lines[name][0][2][0]))
            _, place, rows = heapq.heappop(lines[name])
            self._serve(rows)
            if rows:
                heapq.heappush(lines[name], (self._finish(rows[0]), place, rows))
            if not lines[name]:
                del lines[name]
        return self._given

    def _serve(self, rows: deque[Row]) -> None:
        """A piece for the first of a request's rows. Those that get nothing more leave the line."""
        is_given = self._give(rows[0])
        if not is_given and self._is_whole:
            rows.clear()  # shorter texts that come later mustn't fill its place for ever
        elif not is_given or not self._wanted(rows[0]):
            rows.popleft()

    def _wanted(self, row: Row) -> int:
        return self._groups[row].goal(row) - row.num_held - self._given.get(row, 0)

    def _finish(self, row: Row) -> float:
        """The turn at which its next piece would be read."""
        return self._groups[row].tag + self._cost_s(row, self._quantum(row))

    def _owner_finish(self, name: str, row: Row) -> float:
        return self._all._owners[name].tag + self._cost_s(row, self._quantum(row))

    def _quantum(self, row: Row) -> int:
        """As much as it may have before it is somebody else's turn."""
        return self._wanted(row) if self._is_whole else min(self._wanted(row), QUANTUM)

    def _cost_s(self, row: Row, num_tokens: int) -> float:
        past = row.num_held + self._given.get(row, 0)
        return self._budget.cost_s(num_tokens, past) + self._source_s(row)

    def _source_s(self, row: Row) -> float:
        """What the encoder takes, if it has to come first."""
        group = self._groups[row]
        if not group.source_blocks or group.is_encoded or row in self._given:
            return 0.0
        return self._budget.cost_s(group.request.num_prompt, 0)

    def _give(self, row: Row) -> bool:
        """Its next piece. False: it gets nothing more in this step."""
        num_tokens = self._num_possible(row)
        group = self._groups[row]
        if num_tokens <= 0 or (row in self._waits and group is not self._oldest):
            return False
        owner, cost_s = self._all._owners[group.request.owner], self._cost_s(row, num_tokens)
        group.tag += cost_s
        owner.tag += cost_s
        owner.now = max(owner.now, group.tag)
        self._all._now = max(self._all._now, owner.tag)
        self._left_s -= cost_s
        self._left -= num_tokens
        if self._source_s(row):
            self._left -= group.request.num_prompt
        self._num_free = max(0, self._num_free - -(-num_tokens // self._size))
        self._given[row] = self._given.get(row, 0) + num_tokens
        return True

    def _num_possible(self, row: Row) -> int:
        if self._is_whole:
            return self._num_of_whole(row)
        group, given = self._groups[row], self._given.get(row, 0)
        affordable = self._budget.num_affordable(self._left_s, row.num_held + given)
        if not self._given:
            affordable = max(affordable, MIN_CHUNK)
        num_tokens = min(affordable, self._quantum(row), self._left)
        if group.scores:
            num_tokens = min(num_tokens, self._max_scored - given)
        if self._all._limits.one_token_steps:
            num_tokens = min(num_tokens, 1 - given)
        if self._given and self._source_s(row) > self._left_s:
            return 0
        if group is not self._oldest:  # nobody else may set others back
            num_places = (len(row.blocks) + self._num_free) * self._size
            num_tokens = min(num_tokens, num_places - row.num_held - given)
        return num_tokens

    def _num_of_whole(self, row: Row) -> int:
        """All or nothing. Whoever is first may have more than a step should take."""
        num_tokens = self._wanted(row)
        is_short = num_tokens <= self._left and self._cost_s(row, num_tokens) <= self._left_s
        return num_tokens if not self._given or (is_short and self._num_free) else 0

    def _claim(self, row: Row) -> None:
        """Of those who read the same block next, who has most of it goes on; or the oldest."""
        group, place = self._groups[row], row.num_held // self._size
        if group.needs_all or (place + 1) * self._size > group.goal(row):
            return
        key = self._all.key(row, place)
        if key is None:
            return
        other = self._readers.setdefault(key, row)
        if other.num_held < row.num_held:
            self._readers[key] = row
            self._waits.add(other)
        elif other is not row:
            self._waits.add(row)
