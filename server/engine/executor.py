"""Carries out a plan: runs the model, chooses tokens.

Knows: the session, sampling. Does not know: who is next, what ends a row, time.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise, repeat
from typing import NamedTuple

from quill.server.constraint import Masks
from quill.server.engine.model_runner import Session
from quill.server.engine.step import Choice, Part, Plan, Ranked, StepResult
from quill.server.machine.resources import num_cores
from quill.server.outputs import PositionLogprobs
from quill.server.sampling.beam_search import Search, rank
from quill.server.sampling.native import Hidden, Logits
from quill.server.sampling.sampler import Draw, choose, position_logprobs

# L logits · V vocabulary · M hidden states · D model size


class _Drawn(NamedTuple):
    """One token to choose."""

    part: int
    logits: int  # which of L
    draw: Draw
    num_tops: int | None  # None: nobody asked for logprobs


class Executor:
    """Turns plans into tokens."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._masks = MaskMaker()

    def copy(self, plan: Plan) -> None:
        if plan.copies:
            self._session.copy(plan.copies)

    def encode(self, plan: Plan) -> None:
        if plan.encoding:
            self._session.encode(plan.sources)

    def run(self, plan: Plan) -> StepResult:
        parts = plan.parts
        if not parts:
            return StepResult([], [], {}, {}, set())
        with self._masks.making(parts) as made:  # while the model runs
            logits_LV, hidden_MD = self._session.step([part.piece for part in parts])
        firsts = list(accumulate((len(part.piece.wanted) for part in parts), initial=0))
        prompt_logprobs = {
            part.row.request.request_id: _prompt_logprobs(logits_LV[first:last], part)
            for part, first, last in zip(parts, firsts, firsts[1:], strict=False)
            if _is_scored(part)
        }
        ranked, broken = _rank(logits_LV, parts, firsts)
        broken |= {name for name, reports in prompt_logprobs.items() if not _are_finite(reports)}
        choices = _choose(logits_LV, _drawn(parts, firsts, made.by_place), len(parts))
        hidden = _split(hidden_MD, parts)
        return StepResult(choices, hidden, ranked, prompt_logprobs, broken, made.duration_s)


def _split(hidden_MD: Hidden, parts: Sequence[Part]) -> list[Hidden]:
    firsts = list(accumulate((len(part.piece.hidden) for part in parts), initial=0))
    return [hidden_MD[first:last] for first, last in pairwise(firsts)]


def _drawn(
    parts: Sequence[Part], firsts: Sequence[int], masks: Mapping[int, Masks]
) -> list[_Drawn]:
    """A token for each running row and each of its guesses, and for each row after a prompt."""
    drawn = []
    for place, part in enumerate(parts):
        if part.group.search is not None or not part.takers:
            continue
        num_tops = part.row.request.logprobs
        last, some = firsts[place + 1] - 1, masks.get(place, repeat(None))
        if part.reads:
            (mask,) = islice(some, 1)  # all begin alike
            drawn += [_Drawn(place, last, row.draw(0, mask), num_tops) for row in part.takers]
        else:
            ahead = zip(range(len(part.guesses) + 1), some, strict=False)
            drawn += [
                _Drawn(place, firsts[place] + i, part.row.draw(i, mask), num_tops)
                for i, mask in ahead
            ]
    return drawn


def _choose(logits_LV: Logits, drawn: Sequence[_Drawn], num_parts: int) -> list[list[Choice]]:
    choices: list[list[Choice]] = [[] for _ in range(num_parts)]
    if not drawn:
        return choices
    places = [each.logits for each in drawn]
    tokens, broken = choose(logits_LV, [each.draw for each in drawn], places)
    logprobs: dict[int, PositionLogprobs] = {}
    reporting = [i for i, each in enumerate(drawn) if each.num_tops is not None and i not in broken]
    if reporting:
        reports = position_logprobs(
            logits_LV,
            [tokens[i] for i in reporting],
            [drawn[i].num_tops or 0 for i in reporting],
            [places[i] for i in reporting],
        )
        logprobs = dict(zip(reporting, reports, strict=True))
    for i, (each, token) in enumerate(zip(drawn, tokens, strict=True)):
        choices[each.part].append(Choice(token, logprobs.get(i), i not in broken))
    return choices


def _rank(
    logits_LV: Logits, parts: Sequence[Part], firsts: Sequence[int]
) -> tuple[Ranked, set[str]]:
    """Each beam of a search has a part; before the first token they have one together. Also those
    requests whose logits weren't finite."""
    searches: dict[Search, list[int]] = {}
    for place, part in enumerate(parts):
        if part.group.search is not None and part.takers:
            searches.setdefault(part.group.search, []).append(firsts[place + 1] - 1)
    if not searches:
        return {}, set()
    wanted = [index for indices in searches.values() for index in indices]
    names = [search.request.request_id for search in searches]
    owners = [search.request.request_id for search in searches for _ in searches[search]]
    ranked, broken = rank(logits_LV, list(searches), wanted)
    return dict(zip(names, ranked, strict=True)), {owners[i] for i in broken}


def _is_scored(part: Part) -> bool:
    is_asked = part.row.request.prompt_logprobs is not None
    return is_asked and not part.group.is_forked and bool(part.piece.wanted)


def _are_finite(reports: Sequence[PositionLogprobs]) -> bool:
    return all(each.logprob is None or math.isfinite(each.logprob) for each in reports)


def _prompt_logprobs(logits_LV: Logits, part: Part) -> list[PositionLogprobs]:
    """Of the tokens that follow those with logits; of the prompt's first too, with the second.
    Where a text has masks, of these themselves."""
    request, piece = part.row.request, part.piece
    if request.pooling is not None:
        masks = [piece.ids[place] for place in piece.wanted]
        return position_logprobs(logits_LV, masks, [request.prompt_logprobs or 0] * len(masks))
    start = piece.start + piece.wanted[0]
    following = request.prompt_ids[start + 1 : piece.start + len(piece.ids) + 1]
    num_tops = [request.prompt_logprobs or 0] * len(following)
    first = [PositionLogprobs(request.prompt_ids[0], None, ())] if start == 0 else []
    if not following:
        return first
    return first + position_logprobs(logits_LV[: len(following)], following, num_tops)


MAX_THREADS = 8


@dataclass(eq=False)
class StepMasks:
    """Of one step."""

    by_place: dict[int, Masks] = field(default_factory=dict)  # among the step's parts
    duration_s: float | None = None  # until the last was made; None: nobody needed any


class MaskMaker:
    """Its threads end with it."""

    def __init__(self) -> None:
        # The model's own threads have work on all cores.
        self._num_threads = min(MAX_THREADS, max(1, num_cores() // 2))
        self._pool = ThreadPoolExecutor(self._num_threads, "masks")

    @contextmanager
    def making(self, parts: Sequence[Part]) -> Iterator[StepMasks]:
        """They are there when the block has ended, however it ended."""
        wanted = [
            (place, part)
            for place, part in enumerate(parts)
            if part.takers and part.takers[0].matcher is not None
        ]
        made, began_s = StepMasks(), time.perf_counter()
        shares = [wanted[first :: self._num_threads] for first in range(self._num_threads)]
        futures = [self._pool.submit(_make, share) for share in shares if share]
        try:
            yield made
        finally:
            results = [future.result() for future in futures]
        for masks, ended_s in results:
            made.by_place |= masks
            made.duration_s = max(made.duration_s or 0.0, ended_s - began_s)


def _make(wanted: Sequence[tuple[int, Part]]) -> tuple[dict[int, Masks], float]:
    """And when they were there."""
    masks = {place: part.takers[0].masks(part.guesses) for place, part in wanted}
    return masks, time.perf_counter()
