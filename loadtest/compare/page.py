"""One page that needs nothing else.

Knows: HTML. Does not know: how numbers and pictures were made.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from quill.loadtest.compare.pictures import draw_all
from quill.loadtest.compare.standing import Standing, verdicts
from quill.loadtest.results.report import facts_table, html_page, html_table, image

PAGE = "compare.html"


def write_page(directory: Path, standings: Sequence[Standing], facts: Mapping[str, str]) -> Path:
    numbers = [
        {name: value for name, value in asdict(each).items() if name != "alignment"}
        for each in standings
    ]
    (directory / "compare.json").write_text(json.dumps(numbers, indent=2), encoding="utf-8")
    parts = ["<h1>Translators, before the Transformer and since</h1>"]
    parts += [f"<p>{escape(text)}</p>" for text in verdicts(standings)]
    parts.append(html_table(table(standings)))
    for plot in draw_all(directory, standings):
        parts.append(f"<h2>{escape(plot.title)}</h2><p>{escape(plot.note)}</p>")
        parts.append(image(directory / plot.file, plot.title))
    parts += ["<h2>How it was measured</h2>", facts_table(facts)]
    path = directory / PAGE
    path.write_text(html_page("Translators compared", parts), encoding="utf-8")
    return path


def table(standings: Sequence[Standing]) -> list[list[str]]:
    """Header first."""
    head = ["", "parameters", "minutes", "steps", "held-out loss", "BLEU", "of the longest"]
    rows = [[*head, "trained tokens/s", "served, alone", "16 at once", "as PyTorch"]]
    for each in standings:
        last = f"{each.losses[-1][1]:.3f}" if each.losses else "unknown"
        rows.append(
            [
                f"{each.title} ({each.precision})",
                f"{each.num_parameters:,}",
                f"{each.minutes:.1f}",
                f"{each.num_steps:,}",
                last,
                f"{each.bleu:.1f}",
                f"{each.long_bleu:.1f}",
                f"{each.train_speed:,.0f}",
                f"{each.alone_speed:,.0f}",
                f"{each.crowd_speed:,.0f}",
                f"{each.num_equal} of {each.num_sentences}",
            ]
        )
    return rows
