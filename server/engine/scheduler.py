"""Chooses who runs in the next step.

Knows: lengths, blocks, the time that a step may take. Does not know: text, ONNX, gRPC, threads.

Who starts is decided first (server/scheduler/entrance.py). A step has the running rows, with
guesses where they pay, and beside them pieces of prompts, as many as there is time for
(server/scheduler/prompt_shares.py). Blocks are taken when they are written. If none is left, the
request that started last is set back: it gives all its blocks away, waits at the head of the queue,
and is read again later, to go on with the same tokens. So whoever started first always gets on.
"""

from collections.abc import Sequence

import numpy as np

from quill.server.engine.block_pool import BlockPool
from quill.server.engine.entrance import Entrance
from quill.server.engine.prefill import PromptShares
from quill.server.engine.sequence import Group, Row
from quill.server.engine.speculation import MAX_GUESSES, Guesses
from quill.server.engine.step import (
    BlockCopy,
    Choice,
    Finished,
    Outcome,
    Part,
    Piece,
    Plan,
    Ranked,
    Said,
    Start,
    StepResult,
    Vector,
)
from quill.server.engine.step_budget import Chunk, StepBudget
from quill.server.limits import Limits
from quill.server.request import Request
from quill.server.sampling.native import Hidden

MAX_ALL_GUESSES = 64  # in a step, or one for each row: each has logits


class Scheduler:
    """The queue, and all who have left it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pool = BlockPool(limits.num_blocks)
        self._budget = StepBudget()
        self._shares = PromptShares(self._pool, self._budget, limits)
        self._groups: list[Group] = []  # who started first is first
        self._entrance = Entrance(limits, self._pool, self._shares, self._groups)
        self._num_jump_forward = 0  # tokens without a choice that the step may still have
        self.num_preempted = 0  # so far

    @property
    def num_waiting(self) -> int:
        return len(self._entrance)

    @property
    def num_rows(self) -> int:
        return sum(group.num_rows for group in self._groups)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_blocks_held(self) -> int:
        return self._pool.num_held

    def add(self, request: Request) -> None:
        assert self._limits.fits(request), "the door refuses these"
        fits = request.num_before < self._limits.context
        assert fits or not request.max_new_tokens, "PromptReader refuses these"
        self._entrance.add(request)

    def note(self, plan: Plan, duration_s: float) -> None:
        """How long a step took."""
        chunks = [Chunk(len(part.piece.ids), part.piece.start) for part in plan.reading]
        chunks += [Chunk(group.request.num_prompt, 0) for group in plan.encoding]
        self._budget.note(duration_s, len(plan.running), plan.num_draft_tokens, chunks)

    def plan(self) -> Plan | None:
        """The next step. None: there is nothing to do."""
        self._entrance.open()
        num_running = sum(len(group.running()) for group in self._groups)
        shares = self._shares.share(self._groups, num_running)
        plan, self._num_jump_forward = Plan(), 0
        if not shares:  # whoever runs waits for prompts or for forms, and not for both
            self._num_jump_forward = self._budget.num_jump_forward(num_running)
        for group in self._groups.copy():
            if not group.is_preempted:
                self._run(group, plan, num_running)
            for row in () if group.is_preempted else group.readers():
                if row in shares:
                    self._read(group, row, shares[row], plan)
        if plan.parts or plan.copies:
            return plan
        self._budget.give_up_probe()  # those who should have been alone find no block
        return None

    def _run(self, group: Group, plan: Plan, num_running: int) -> None:
        """The rows that are ready; a search only if there is room for all of its beams."""
        rows = group.running()
        ready = [row for row in rows if self._make_room(group, row, 1, plan)]
        if group.search is not None and len(ready) < len(rows):
            return
        for row in ready:
            guesses, is_forced = self._guess(row, num_running)
            ids = (*row.ids(row.num_held, row.num_text), *guesses)
            piece = self._piece(group, row, ids, range(len(ids)))
            part = Part(piece, group, row, (row,), guesses, is_forced, reads=False)
            plan.running.append(part)

    def _guess(self, row: Row, num_running: int) -> tuple[list[int], bool]:
        """How a row goes on, perhaps; and whether its form leaves no choice."""
        if not self._limits.speculative or not row.may_guess:
            return [], False
        num_each = max(1, MAX_ALL_GUESSES // max(1, num_running))
        most = min(row.max_tokens - len(row.token_ids) - 1, num_each)
        forced = self._fitting(row, row.forced(min(most, MAX_GUESSES, self._num_jump_forward)))
        if forced:
            self._num_jump_forward -= len(forced)
            return forced, True
        if row.guesses is None:
            row.guesses = Guesses(row.ids(0, row.num_text))
        least_rate = self._budget.least_rate(num_running)
        if least_rate > 0:  # guesses of all rows take no longer than the rows
            most = min(most, max(1, int(1 / least_rate)))
        return self._fitting(row, row.allowed(row.guesses.next(most, least_rate))), False

    def _fitting(self, row: Row, guesses: list[int]) -> list[int]:
        """Those that there are blocks for."""
        while len(row.blocks) * self._limits.block_size < row.num_text + len(guesses):
            if self._pool.num_free <= self.num_rows:  # nobody is set back for a guess
                return guesses[: len(row.blocks) * self._limits.block_size - row.num_text]
            row.blocks.append(self._pool.take())
        return guesses

    def _read(self, group: Group, row: Row, num_tokens: int, plan: Plan) -> None:
        """A piece of a prompt, or of what was set back."""
        if not self._make_room(group, row, num_tokens, plan):
            return
        if not group.is_told:
            group.is_told, group.num_cached = True, row.num_held
            plan.starts.append(Start(group.request, row.num_held))
        if group.source_blocks and not group.is_encoded:
            plan.encoding.append(group)
        stop = row.num_held + num_tokens
        is_end = group.is_new and stop == group.goal(row)
        takers = group.rows if is_end and group.request.max_new_tokens else ()
        first = num_tokens - 1 if takers else num_tokens
        if group.scores and not group.is_forked:
            first = min(first, max(0, group.num_scored - row.num_held))
        ids, wanted = row.ids(row.num_held, stop), range(first, num_tokens)
        reading = group.request.pooling
        piece = self._piece(group, row, ids, wanted if reading is None else reading.masks)
        if row.pooled is not None:
            hidden = row.pooled.wanted(row.num_held, stop)
            piece = piece._replace(hidden=[place - row.num_held for place in hidden])
        plan.reading.append(Part(piece, group, row, takers))

    def _piece(self, group: Group, row: Row, ids: Sequence[int], wanted: Sequence[int]) -> Piece:
        length = len(group.request.source_ids or ())
        return Piece(ids, row.num_held, row.blocks, wanted, group.source_blocks, length)

    def _make_room(self, group: Group, row: Row, num_tokens: int, plan: Plan) -> bool:
        """Blocks of its own for a row's next tokens. False: it has to wait for those before it."""
        size = self._limits.block_size
        place = row.num_held // size
        if place < len(row.blocks) and self._pool.is_shared(row.blocks[place]):
            if not self._free_one(group):
                return False
            copy = BlockCopy(row.blocks[place], self._pool.take())
            plan.copies.append(copy)
            plan.copying.append(row)
            self._pool.release([copy.source])
            row.blocks[place] = copy.target
        while len(row.blocks) * size < row.num_held + num_tokens:
            if not self._free_one(group):
                return False
            row.blocks.append(self._pool.take())
        return True

    def _free_one(self, group: Group) -> bool:
        while not self._pool.num_free:
            last = self._groups[-1]
            if last is group:
                return False
            self._preempt_group(last)
        return True

    def _preempt_group(self, group: Group) -> None:
        self._groups.remove(group)
        for blocks in group.drop_blocks():
            self._pool.release(blocks)
        group.is_preempted = True
        self._entrance.put_back(group)
        self.num_preempted += 1

    def commit(self, plan: Plan, result: StepResult) -> Outcome:
        """The plan was carried out."""
        outcome = Outcome(broken=set(result.broken))
        for part, choices, hidden_MD in zip(plan.parts, result.choices, result.hidden, strict=True):
            if part.group.request.pooling is not None:
                self._commit_text(part, hidden_MD, outcome)
            elif part.reads:
                self._commit_read(part, choices, outcome)
            else:
                self._commit_run(part, choices, outcome)
        for group in {part.group: None for part in plan.parts if part.takers}:
            if group.search is not None:
                self._advance(group, result.ranked, outcome)
        for part in plan.parts if outcome.broken else ():
            if part.row.request.request_id in outcome.broken:
                self._pool.forget(part.row.blocks)
        for row, _ in outcome.finished:
            self.remove(row.request.request_id, row.sequence)
        return outcome

    def _commit_read(self, part: Part, choices: Sequence[Choice], outcome: Outcome) -> None:
        group, row = part.group, part.row
        group.is_encoded = bool(group.source_blocks)
        self._hold(row, row.num_held + len(part.piece.ids))
        group.num_scored = max(group.num_scored, row.num_held)
        if group.is_forked or row.num_held < group.goal(row):
            return
        group.is_forked = True
        self._follow(group.rows, [0] * len(group.rows))
        if not group.is_new or group.search is not None:
            return
        for each, taken in enumerate(group.rows):
            self._say(taken, choices[each : each + 1], (), outcome)

    def _commit_text(self, part: Part, hidden_MD: Hidden, outcome: Outcome) -> None:
        group, row = part.group, part.row
        self._hold(row, row.num_held + len(part.piece.ids))
        if row.pooled is not None:
            row.pooled.add(hidden_MD, row.num_held)
        if row.num_held < group.goal(row):
            return
        if row.pooled is not None:
            vector_D = row.pooled.vector_D()
            if not np.isfinite(vector_D).all():
                outcome.broken.add(row.request.request_id)
                return
            outcome.vectors.append(Vector(row, vector_D))
        group.rows.remove(row)
        self._pool.release(row.blocks)
        if group.next_text() is not None and not group.rows:
            group.begin_text()
        elif not group.rows:
            outcome.finished.append(Finished(row, "length"))

    def _commit_run(self, part: Part, choices: Sequence[Choice], outcome: Outcome) -> None:
        row, guesses = part.row, part.guesses
        if part.group.search is not None:
            self._hold(row, row.num_text)
            return
        num_before = len(row.token_ids)
        self._say(row, choices, guesses, outcome)
        num_right = max(0, len(row.token_ids) - num_before - 1)
        if guesses:
            if row.guesses is not None and not part.is_forced:
                row.guesses.learn(len(guesses), num_right)
            row.num_draft_tokens += len(guesses)
            row.num_accepted += num_right
            outcome.num_accepted += num_right
            outcome.num_jump_forward += num_right if part.is_forced else 0
        self._hold(row, row.num_text - 1)

    def _say(
        self, row: Row, choices: Sequence[Choice], guesses: Sequence[int], outcome: Outcome
    ) -> None:
        """A row's next token, and those after it as far as the guesses were right."""
        for place, (token, logprobs, is_finite) in enumerate(choices):
            if row.is_lost:
                outcome.lost.add(row.request.request_id)
                return
            if not is_finite:
                outcome.broken.add(row.request.request_id)
                return
            row.add(token)
            outcome.said.append(Said(row, token, logprobs))
            is_right = place < len(guesses) and guesses[place] == token
            if not is_right or row.finish_reason() is not None:
                break
        reason = row.finish_reason()
        if reason is not None:
            outcome.finished.append(Finished(row, reason))

    def _hold(self, row: Row, num_held: int) -> None:
        """So much of a row's text is in its blocks: those that are full can be found from now."""
        row.num_held = num_held
        size = self._limits.block_size
        if row.request.source_ids is not None:
            return  # what they hold depends on the source
        for place in range(row.num_known, num_held // size):
            key = self._shares.key(row, place)
            row.blocks[place] = self._pool.keep(key, row.blocks[place])
        row.num_known = num_held // size

    def _advance(self, group: Group, ranked: Ranked, outcome: Outcome) -> None:
        """One step of a search: row i has its i-th beam."""
        search = group.search
        assert search is not None
        parents = search.advance(ranked[group.request.request_id])
        num_wanted = group.request.num_sequences if search.is_over else len(group.rows)
        if len(search.answers if search.is_over else parents) < num_wanted:
            outcome.broken.add(group.request.request_id)  # too few tokens have finite logits
            return
        if search.is_over:
            outcome.found.append(search)
            self.remove(group.request.request_id)
            return
        self._follow(group.rows, parents)
        for row, beam in zip(group.rows, search.running, strict=True):
            row.token_ids = list(beam.token_ids)

    def _follow(self, rows: Sequence[Row], parents: Sequence[int]) -> None:
        """Row i goes on from the blocks of row parents[i]; what is written next is parted then."""
        before = [(row.blocks, row.num_held, row.num_known) for row in rows]
        for place, (row, parent) in enumerate(zip(rows, parents, strict=True)):
            if place != parent:
                blocks, row.num_held, row.num_known = before[parent]
                self._pool.share(blocks)
                row.blocks = blocks.copy()
        for place, parent in enumerate(parents):
            if place != parent:
                self._pool.release(before[place][0])

    def remove(self, request_id: str, sequence: int | None = None) -> None:
        """Forgets a request, or one of its answers, wherever it is."""
        found = [group for group in self._groups if group.request.request_id == request_id]
        set_back = self._entrance.waiting(request_id)
        found += [] if set_back is None else [set_back]
        for group in found:
            gone = [row for row in group.rows if sequence in (None, row.sequence)]
            if len(gone) < len(group.rows) and not group.is_forked and group.rows[0] in gone:
                self._follow([group.rows[0], next(r for r in group.rows if r not in gone)], [0, 0])
            group.rows = [row for row in group.rows if row not in gone]
            for row in gone:
                self._pool.release(row.blocks)
            if group.rows:
                return
            self._pool.release(group.source_blocks)
            if group in self._groups:
                self._groups.remove(group)
        self._entrance.remove(request_id)
