"""Servers as a table of text, a line each, and their totals.

Knows: columns. Does not know: terminals, where the numbers come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quill.server.client.top.numbers import Buckets, Numbers, quantile, share, total

HEADS = (
    *("server", "health", "running", "waiting", "tokens/s", "first token", "gap"),
    *("cache", "hits", "drafts"),
)
_NOTHING = "–"


@dataclass(frozen=True)
class Row:
    """A server that answers has numbers; of another one the problem is known."""

    address: str
    numbers: Numbers | None
    problem: str = ""


def table(rows: Sequence[Row]) -> list[str]:
    """The heads, a line for each server, and one for all of them if there are several."""
    cells = [list(HEADS)]
    for row in rows:
        if row.numbers is None:
            cells.append([row.address, row.problem])
        else:
            health = "serving" if row.numbers.serving else "not serving"
            cells.append([row.address, health, *_cells(row.numbers)])
    there = [row.numbers for row in rows if row.numbers is not None]
    if len(rows) > 1:
        every = total(there)
        health = f"{every.serving:g} of {len(rows)} serve"
        cells.append(["all", health, *_cells(every)])
    return _aligned(cells)


def _cells(of: Numbers) -> list[str]:
    return [
        f"{of.running:g}/{of.max_num_seqs:g}",
        f"{of.waiting:g}",
        f"{of.tokens_per_s:,.{0 if of.tokens_per_s >= 10 else 1}f}",
        _times(of.first_token),
        _times(of.gap),
        _percent(share(of.held, of.blocks - of.held)),
        _percent(share(of.hits, of.misses)),
        _percent(share(of.accepted, of.draft - of.accepted)),
    ]


def _times(buckets: Buckets) -> str:
    """The median and the 95th percentile."""
    both = [quantile(buckets, q) for q in (0.5, 0.95)]
    return " / ".join(_duration(each) for each in both if each is not None) or _NOTHING


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    ms = 1000 * seconds
    return f"{ms:.{0 if ms >= 10 else 1}f} ms"


def _percent(part: float | None) -> str:
    return _NOTHING if part is None else f"{part:.0%}"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Names to the left, numbers to the right. A problem runs on over what isn't there."""
    whole = [each for each in cells if len(each) == len(HEADS)]
    widths = [max(len(each[column]) for each in whole) for column in range(len(HEADS))]
    widths[0] = max(len(each[0]) for each in cells)
    lines = []
    for each in cells:
        padded = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(each, widths, strict=False))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines
