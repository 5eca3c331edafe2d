"""Carries out a plan: runs the model, chooses tokens, copies slots.

Knows: the session, sampling, the prefix cache. Does not know: who is next, what ends a row, time.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quill.server.events import PositionLogprobs
from quill.server.runtime.model_runner import Session
from quill.server.runtime.prefix_cache import PrefixCache
from quill.server.sampling.arrays import Logits
from quill.server.sampling.beam_ranking import rank
from quill.server.sampling.logprobs import position_logprobs
from quill.server.sampling.sampler import choose
from quill.server.scheduler.beam_rows import Ranked, searches
from quill.server.scheduler.plan import Copy, DecodePlan, EncodePlan, Plan, PrefillPlan
from quill.server.scheduler.row import Row

# R rows · L logits · V vocabulary


class StepResult(NamedTuple):
    """One entry for each of the plan's rows; none while a prompt or source is being read."""

    tokens: list[int]
    logprobs: list[PositionLogprobs | None]
    broken: set[int]  # rows whose logits weren't finite: their tokens mean nothing
    prompt_logprobs: list[PositionLogprobs]
    ranked: Ranked  # what searches have instead of tokens


NOTHING = StepResult([], [], set(), [], {})


class Executor:
    """Turns plans into tokens."""

    def __init__(self, session: Session, prefix_cache: PrefixCache) -> None:
        self._session = session
        self._prefix_cache = prefix_cache

    def run(self, plan: Plan) -> StepResult:
        match plan:
            case DecodePlan():
                return self._decode(plan)
            case EncodePlan():
                return self._encode(plan)
            case PrefillPlan():
                return self._prefill(plan)

    def copy(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self._session.copy(copy)

    def _decode(self, plan: DecodePlan) -> StepResult:
        ids = [row.last_token for row in plan.rows]
        lengths = [row.num_cached for row in plan.rows]
        return _sample(self._session.decode(ids, lengths), plan.rows, range(len(plan.rows)))

    def _encode(self, plan: EncodePlan) -> StepResult:
        for request, _, slot in plan.encodings:
            assert request.source_ids is not None
            self._session.encode(slot, request.source_ids)
        return NOTHING

    def _prefill(self, plan: PrefillPlan) -> StepResult:
        if plan.is_first:
            self._load_prefix(plan)
        ids = plan.request.prompt_ids[plan.start : plan.stop]
        logits_LV = self._session.prefill(plan.slot, plan.start, ids, _wanted(plan))
        self._keep_prefix(plan)
        result = NOTHING
        if plan.is_last and plan.request.max_new_tokens:
            result = _sample(logits_LV, plan.rows, [len(logits_LV) - 1] * len(plan.rows))
        if plan.request.prompt_logprobs is not None:
            return result._replace(prompt_logprobs=_prompt_logprobs(logits_LV, plan))
        return result

    def _load_prefix(self, plan: PrefillPlan) -> None:
        """Writes what the cache has into the slot, up to where the chunk starts."""
        start = 0
        if plan.cached:
            request = plan.request
            for positions in self._prefix_cache.load(request.prompt_ids, request.cache_scope):
                self._session.write(plan.slot, start, positions[:, :, : plan.cached - start])
                start += positions.shape[2]
        assert start >= plan.cached

    def _keep_prefix(self, plan: PrefillPlan) -> None:
        ids = plan.request.prompt_ids[: plan.stop]
        scope = plan.request.cache_scope
        self._prefix_cache.keep(ids, lambda a, b: self._session.read(plan.slot, a, b), scope)


def _wanted(plan: PrefillPlan) -> range:
    """The chunk's tokens after which logits are needed."""
    length = plan.stop - plan.start
    if plan.request.prompt_logprobs is not None:
        return range(length)
    return range(length - 1, length) if plan.is_last else range(0)


def _sample(logits_LV: Logits, rows: Sequence[Row], places: Sequence[int]) -> StepResult:
    """`places` says where among the logits each row's are."""
    tokens, logprobs = [0] * len(rows), list[PositionLogprobs | None]([None] * len(rows))
    ranked, broken = _rank(logits_LV, rows, places)
    drawn = [i for i, row in enumerate(rows) if row.search is None]
    if drawn:
        drawn_places = [places[i] for i in drawn]
        choices = choose(logits_LV, [rows[i].draw() for i in drawn], drawn_places)
        broken |= {drawn[i] for i in choices.broken}
        for i, token in zip(drawn, choices.tokens, strict=True):
            tokens[i] = token
        reporting = [i for i in drawn if rows[i].request.logprobs is not None and i not in broken]
        if reporting:
            reports = position_logprobs(
                logits_LV,
                [tokens[i] for i in reporting],
                [rows[i].request.logprobs or 0 for i in reporting],
                [places[i] for i in reporting],
            )
            for i, report in zip(reporting, reports, strict=True):
                logprobs[i] = report
    return StepResult(tokens, logprobs, broken, [], ranked)


def _rank(logits_LV: Logits, rows: Sequence[Row], places: Sequence[int]) -> tuple[Ranked, set[int]]:
    """What searches go on with, and the rows whose logits weren't finite."""
    found = searches(rows)
    if not found:
        return {}, set()
    # Before the first token all rows of a search are alike, and only one of them counts.
    wanted = [i for search, beams in found.items() for i in beams[: len(search.running)]]
    rankings = rank(logits_LV, list(found), [places[i] for i in wanted])
    by_request = {
        search.request.request_id: each for search, each in zip(found, rankings.ranked, strict=True)
    }
    return by_request, {wanted[i] for i in rankings.broken}


def _prompt_logprobs(logits_LV: Logits, plan: PrefillPlan) -> list[PositionLogprobs]:
    """Of the tokens that follow the chunk's; for the first chunk, of the prompt's first too."""
    request = plan.request
    following = request.prompt_ids[plan.start + 1 : plan.stop + 1]
    num_tops = [request.prompt_logprobs or 0] * len(following)
    first = [PositionLogprobs(request.prompt_ids[0], None, ())] if plan.start == 0 else []
    if not following:
        return first
    return first + position_logprobs(logits_LV[: len(following)], following, num_tops)
