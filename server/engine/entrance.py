"""Who leaves the queue before a step.

Knows: the queue, how many blocks are free and will be needed. Does not know: steps, what rows say.

All start that find a place. One that doesn't may be overtaken, by its own cost at most. A request
that was set back waits here, too, with all that it has said.
"""

from quill.server.engine.block_pool import BlockPool
from quill.server.engine.fair_queue import RequestQueue, cost
from quill.server.engine.prefill import PromptShares
from quill.server.engine.sequence import Group, group_of
from quill.server.limits import Limits
from quill.server.request import Request

LOOK_AHEAD = 64  # requests in the queue that may start before a step


class Entrance:
    """`groups` are those who have left it, who started first is first; they join at its end."""

    def __init__(
        self, limits: Limits, pool: BlockPool, shares: PromptShares, groups: list[Group]
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._shares = shares
        self._groups = groups
        self._queue = RequestQueue()
        self._preempted: dict[str, Group] = {}
        self._overtaken: dict[str, int] = {}  # of those who wait: by how many tokens

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request) -> None:
        self._queue.add(request)

    def put_back(self, group: Group) -> None:
        """At the head of the queue. It has given its blocks away."""
        self._preempted[group.request.request_id] = group
        self._queue.put_back(group.request)

    def waiting(self, request_id: str) -> Group | None:
        """One that was set back."""
        return self._preempted.get(request_id)

    def remove(self, request_id: str) -> None:
        self._preempted.pop(request_id, None)
        self._overtaken.pop(request_id, None)
        self._queue.remove(request_id)

    def open(self) -> None:
        """For all that find a place."""
        first: Request | None = None
        waiting = self._queue.in_order(LOOK_AHEAD)
        has_texts = any(group.next_text() is not None for group in self._groups)
        groups = self._groups if waiting or has_texts else ()
        num_spare = self._pool.num_free - sum(self._num_missing(group) for group in groups)
        for request in waiting:
            overtaken = 0
            if first is not None:
                overtaken = self._overtaken.get(first.request_id, 0) + cost(request)
                if overtaken > cost(first):
                    continue
            if self._has_room(request, num_spare):
                group = self._begin(request)
                num_spare -= len(group.source_blocks) + self._num_missing(group)
                if first is not None:
                    self._overtaken[first.request_id] = overtaken
            elif first is None:
                first = request
        if first is not None:
            num_spare -= self._limits.num_blocks_of(first, 1)
        self._begin_texts(num_spare)

    def _begin_texts(self, num_spare: int) -> None:
        """More of those that are only read, as many as a step could take and nobody waits for."""
        for group in self._groups if num_spare > 0 else ():
            num_unread = sum(row.num_text - row.num_held for row in group.rows)
            while (text := group.next_text()) is not None:
                num_blocks = -(-len(text) // self._limits.block_size)
                num_unread += len(text)
                if num_blocks > num_spare or num_unread > self._limits.max_read:
                    break
                group.begin_text()
                num_spare -= num_blocks

    def _num_missing(self, group: Group) -> int:
        """Blocks that it will need soon: for the rest of its prompt, and one more for each row."""
        size = self._limits.block_size
        missing = (-(-row.num_text // size) - len(row.blocks) for row in group.own_rows())
        num_answers = 0 if group.request.pooling is not None else len(group.rows)
        return num_answers + sum(max(0, each) for each in missing)

    def _has_room(self, request: Request, num_spare: int) -> bool:
        group = self._preempted.get(request.request_id)
        num_rows = request.num_rows if group is None else group.num_rows
        if sum(each.num_rows for each in self._groups) + num_rows > self._limits.max_num_seqs:
            return False
        if not self._groups:
            return True
        num_tokens = 0 if group is None else max(len(row.token_ids) for row in group.rows)
        num_needed = self._limits.num_blocks_of(request, num_tokens + 1)
        if num_spare < num_needed <= num_spare + request.num_before // self._limits.block_size:
            num_needed -= self._shares.num_shareable(request)
        return num_needed <= num_spare

    def _begin(self, request: Request) -> Group:
        self._queue.serve(request)
        group = self._preempted.pop(request.request_id, None)
        group = group_of(request, self._limits.context) if group is None else group
        group.is_preempted = False
        num_blocks = self._limits.num_source_blocks(request)
        group.source_blocks = [self._pool.take() for _ in range(num_blocks)]
        self._shares.enter(group)
        self._groups.append(group)
        return group
