"""The rows of a search: which beam each holds, and what must be copied when that changes.

Knows: rows, searches, slots as numbers. Does not know: logits, when a step runs.
"""

from collections.abc import Mapping, Sequence

from quill.server.beams import Continuation, Search, follow
from quill.server.plan import Copy
from quill.server.row import Row

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
