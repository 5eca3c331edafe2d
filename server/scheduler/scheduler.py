"""Chooses who runs in the next step.

Knows: lengths, free slots, the token budget. Does not know: text, ONNX, gRPC, threads, time.

Running rows decode first; between two decode steps a chunk of a prompt is read, several short
prompts while there is time, or the sources of a few translations. Rows fill the first slots without
a gap; the prompt being read has the slot that was next when it began. Rows only leave while it is
read, so its slot is never in their way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quill.server.request import Request
from quill.server.sampling.beam_search import Search
from quill.server.scheduler.batch_invariance import MIN_CHUNK, chunk_length
from quill.server.scheduler.beam_rows import Ranked, advance, searches
from quill.server.scheduler.plan import (
    Copy,
    DecodePlan,
    EncodePlan,
    Encoding,
    Finished,
    Outcome,
    Plan,
    PrefillPlan,
)
from quill.server.scheduler.request_queue import RequestQueue
from quill.server.scheduler.row import Row, rows_of

# Logits are wanted for every token of such a chunk: 64 x 49,152 of them are 12 MB.
MAX_LOGPROBS_CHUNK = 64


NOTHING_RANKED: Ranked = {}


class PrefixIndex(Protocol):
    """Knows which prompts were read before."""

    def match(self, ids: Sequence[int], scope: str = "") -> int:
        """How many of the first tokens needn't be read again."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_rows: int
    context: int  # tokens of prompt and answer together


@dataclass(eq=False)
class _Prefill:
    request: Request
    rows: list[Row]
    slot: int
    cached: int
    start: int


class Scheduler:
    """The queue, the prompt being read, and the running rows."""

    def __init__(self, limits: Limits, prefixes: PrefixIndex) -> None:
        self._limits = limits
        self._prefixes = prefixes
        self._queue = RequestQueue()
        self._prefill: _Prefill | None = None
        self._rows: list[Row] = []
        self._decode_is_next = False

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def add(self, request: Request) -> None:
        assert request.num_rows <= self._limits.max_rows, "RequestReader refuses these"
        fits = len(request.prompt_ids) < self._limits.context
        assert fits or not request.max_new_tokens, "PromptReader refuses these"
        self._queue.add(request)

    def plan(self, max_chunk: int, go_on: bool = False) -> Plan | None:
        """The next step, with at most so many tokens of a prompt. None: there is nothing to do.

        `go_on`: reading may go on for another step before rows decode again.
        """
        request = self._next(len(self._rows)) if self._prefill is None else None
        is_reading = self._prefill is not None or request is not None
        decodes = self._decode_is_next and not go_on
        if self._rows and (decodes or not is_reading):
            self._decode_is_next = False
            return DecodePlan(tuple(self._rows))
        self._decode_is_next = True
        if request is not None and request.source_ids is not None:
            return self._encode(max_chunk)
        if request is not None:
            self._prefill = self._begin(request)
        return None if self._prefill is None else self._chunk(self._prefill, max_chunk)

    def _next(self, num_rows: int) -> Request | None:
        """Who starts next, beside so many rows. None: nobody waits, or the first doesn't fit."""
        request = self._queue.first()
        if request is None or num_rows + request.num_rows > self._limits.max_rows:
            return None  # nobody overtakes the first, or one who needs many slots would never start
        return request

    def _encode(self, max_tokens: int) -> EncodePlan:
        """The first source, and those behind it that fit, within the time that a chunk takes."""
        encodings: list[Encoding] = []
        num_rows = num_tokens = 0
        while (request := self._next(len(self._rows) + num_rows)) is not None:
            num_tokens += request.num_prompt
            if encodings and num_tokens > max_tokens:
                break
            self._queue.remove(request.request_id)
            rows = rows_of(request, self._limits.context)
            encodings.append(Encoding(request, tuple(rows), len(self._rows) + len(encodings)))
            num_rows += len(rows)
        return EncodePlan(tuple(encodings))

    def _begin(self, request: Request) -> _Prefill:
        self._queue.remove(request.request_id)
        cached = self._num_reusable(request)
        rows = rows_of(request, self._limits.context)
        return _Prefill(request, rows, len(self._rows), cached, cached)

    def _num_reusable(self, request: Request) -> int:
        if request.prompt_logprobs is not None:
            return 0  # every position's logits are wanted
        most = len(request.prompt_ids) - MIN_CHUNK
        kept = self._prefixes.match(request.prompt_ids, request.cache_scope)
        return max(0, min(kept, most))

    def _chunk(self, prefill: _Prefill, max_chunk: int) -> PrefillPlan:
        if prefill.request.prompt_logprobs is not None:
            max_chunk = min(max_chunk, MAX_LOGPROBS_CHUNK)
        remaining = len(prefill.request.prompt_ids) - prefill.start
        return PrefillPlan(
            request=prefill.request,
            rows=tuple(prefill.rows),
            slot=prefill.slot,
            start=prefill.start,
            stop=prefill.start + chunk_length(remaining, max_chunk),
            cached=prefill.cached,
        )

    def commit(self, plan: Plan, tokens: Sequence[int], ranked: Ranked = NOTHING_RANKED) -> Outcome:
        """The plan was carried out: each of its rows has a token, if its prompt is read.

        A search has `ranked` continuations instead; the tokens of its rows mean nothing.
        """
        match plan:
            case DecodePlan():
                return self._commit_decode(plan, tokens, ranked)
            case EncodePlan():
                return self._commit_encode(plan)
            case PrefillPlan():
                return self._commit_prefill(plan, tokens, ranked)

    def _commit_encode(self, plan: EncodePlan) -> Outcome:
        """A request's first row has the slot that its source was read into; others get copies."""
        self._rows += [each.rows[0] for each in plan.encodings]
        copies = []
        for each in plan.encodings:
            for row in each.rows[1:]:
                copies.append(Copy(each.slot, len(self._rows), 0, with_source=True))
                self._rows.append(row)
        return Outcome([], copies, [])

    def _commit_prefill(self, plan: PrefillPlan, tokens: Sequence[int], ranked: Ranked) -> Outcome:
        assert self._prefill is not None
        assert self._prefill.request is plan.request
        self._prefill.start = plan.stop
        if not plan.is_last:
            return Outcome([], [], [])
        self._prefill = None
        finished, running = _add(plan.rows, tokens)
        search = plan.rows[0].search
        if search is not None:
            advance(plan.rows, range(len(plan.rows)), ranked)
            running = [] if search.is_over else list(plan.rows)
        first = len(self._rows)
        self._rows += running
        targets = range(first, len(self._rows))
        copies = [Copy(plan.slot, target, plan.stop) for target in targets if target != plan.slot]
        return Outcome(finished, copies, [] if search is None or running else [search])

    def _commit_decode(self, plan: DecodePlan, tokens: Sequence[int], ranked: Ranked) -> Outcome:
        assert list(plan.rows) == self._rows
        finished, _ = _add(plan.rows, tokens)
        gone, copies, found = {each.row for each in finished}, list[Copy](), list[Search]()
        for search, slots in searches(plan.rows).items():
            rows = [plan.rows[slot] for slot in slots]
            copies += advance(rows, slots, ranked)
            if search.is_over:
                found.append(search)
                gone |= set(rows)
        return Outcome(finished, copies + self._take_out(gone), found)

    def remove(self, request_id: str, sequence: int | None = None) -> list[Copy]:
        """Forgets a request, or one of its answers, wherever it is."""
        self._queue.remove(request_id)
        gone = {row for row in self._rows if _is(row, request_id, sequence)}
        if self._prefill is not None:
            left = [row for row in self._prefill.rows if not _is(row, request_id, sequence)]
            self._prefill.rows = left
            if not left:
                self._prefill = None
        return self._take_out(gone)

    def _take_out(self, gone: set[Row]) -> list[Copy]:
        """Fills each gap with the last row."""
        rows, copies = self._rows, list[Copy]()
        for slot in range(len(rows)):
            while len(rows) > slot and rows[-1] in gone:
                rows.pop()
            if slot < len(rows) and rows[slot] in gone:
                rows[slot] = rows.pop()
                copies.append(Copy(len(rows), slot, rows[slot].num_cached, with_source=True))
        return copies


def _add(rows: Sequence[Row], tokens: Sequence[int]) -> tuple[list[Finished], list[Row]]:
    """Gives each row its token; answers which are complete and which go on."""
    finished, running = [], []
    for index, row in enumerate(rows):
        if row.search is not None:
            continue  # see advance()
        if row.max_tokens:  # a request that only reads its prompt is given no tokens
            row.add(tokens[index])
        reason = row.finish_reason()
        if reason is None:
            running.append(row)
        else:
            finished.append(Finished(row, reason))
    return finished, running


def _is(row: Row, request_id: str, sequence: int | None) -> bool:
    return row.request.request_id == request_id and sequence in (None, row.sequence)
