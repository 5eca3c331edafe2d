"""The rows of a search: which beam each holds, and what must be copied when that changes.

Knows: rows, searches, slots as numbers. Does not know: logits, when a step runs.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quill.server.sampling.beam_search import Continuation, Search
from quill.server.scheduler.plan import Copy
from quill.server.scheduler.row import Row

Ranked = Mapping[str, Sequence[Continuation]]  # by request


def searches(rows: Sequence[Row]) -> dict[Search, list[int]]:
    """The searches among some rows, and where in them the beams are, best first."""
    places: dict[Search, list[int]] = {}
    for place, row in enumerate(rows):
        if row.search is not None:
            places.setdefault(row.search, []).append(place)
    for found in places.values():
        found.sort(key=lambda place: rows[place].beam)
    return places


def advance(rows: Sequence[Row], slots: Sequence[int], ranked: Ranked) -> list[Copy]:
    """One step of a search whose beams are in `rows`, best first, and these in `slots`."""
    request, search = rows[0].request, rows[0].search
    assert search is not None
    texts = [row.token_ids for row in rows]
    parents = search.advance(ranked[request.request_id])
    if search.is_over:
        return []
    assert len(parents) == len(rows), "SamplingReader._check_vocabulary refuses these"
    places, moves = follow(texts, parents)
    for beam, place in enumerate(places):
        rows[place].beam = beam
        rows[place].token_ids = list(search.running[beam].token_ids)
    num_prompt = len(request.prompt_ids)
    return [
        Copy(slots[source], slots[target], num_prompt + len(texts[source]), num_prompt + num_same)
        for source, target, num_same in moves
        if num_same < len(texts[source])
    ]


class Move(NamedTuple):
    """A beam goes on in another row, which holds the same text up to `num_same` tokens."""

    source: int
    target: int
    num_same: int


def follow(texts: Sequence[Sequence[int]], parents: Sequence[int]) -> tuple[list[int], list[Move]]:
    """Which row each beam goes on in: beam i continues the text of row parents[i].

    Each text that goes on stays where it is, for its best beam. Another beam of the same parent
    takes the row of a text that ended, of those the one that parted from the parent last: only
    what came after has to be copied.
    """
    free = sorted(set(range(len(texts))) - set(parents))
    places, moves = list[int](), list[Move]()
    for beam, parent in enumerate(parents):
        if parents.index(parent) == beam:  # the parent's best
            places.append(parent)
            continue
        same = {row: _num_same(texts[row], texts[parent]) for row in free}
        target = max(free, key=lambda row: same[row])
        free.remove(target)
        places.append(target)
        moves.append(Move(parent, target, same[target]))
    return places, moves


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=True)):
        if a != b:
            return place
    return len(one)
