"""Pictures of translators side by side.

Knows: matplotlib. Does not know: pages, how numbers were measured.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from quill.loadtest.compare.standing import Standing
from quill.loadtest.results.plots import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    RED,
    Plot,
    legend_above,
    new_figure,
    save,
)

_LINES = (
    (RED, ":", "o"),
    (ORANGE, "--", "s"),
    (GREEN, "-.", "^"),
    (BLUE, "-", "D"),
    (BLACK, "-", "x"),
)


def draw_all(directory: Path, standings: Sequence[Standing]) -> list[Plot]:
    """All pictures, in the page's order."""
    _bleu(standings, directory / "bleu.png")
    _alignments(standings, directory / "alignments.png")
    _losses(standings, directory / "loss.png")
    _speeds(standings, directory / "speed.png")
    return [
        Plot(
            "bleu.png",
            "BLEU against the source's length",
            "Served translations of the test set, in groups of equally many sentences.",
        ),
        Plot(
            "alignments.png",
            "Alignments",
            "Which source token (across) each looked at while it wrote a token (down). Each wrote "
            "its own translation.",
        ),
        Plot("loss.png", "Loss against time", "On held-out pairs, in nats a token."),
        Plot(
            "speed.png",
            "Tokens a second",
            "In training; served one sentence at a time; and served 16 sentences at once.",
        ),
    ]


def _style(number: int) -> dict[str, Any]:
    color, dashes, marker = _LINES[number % len(_LINES)]
    return {"color": color, "linestyle": dashes, "marker": marker}


def _bleu(standings: Sequence[Standing], path: Path) -> None:
    figure, (panel,) = new_figure("")
    for number, each in enumerate(standings):
        means = [group.mean for group in each.by_length]
        panel.plot(means, [g.bleu for g in each.by_length], label=each.title, **_style(number))
    groups = standings[0].by_length
    panel.set_xticks([group.mean for group in groups])
    panel.set_xticklabels([f"{group.shortest}-{group.longest}" for group in groups])
    panel.set(xlabel="tokens of the source", ylabel="BLEU")
    panel.set_ylim(bottom=0)
    legend_above(panel)
    save(figure, path)


def _losses(standings: Sequence[Standing], path: Path) -> None:
    figure, (panel,) = new_figure("")
    for number, each in enumerate(standings):
        minutes, losses = zip(*each.losses, strict=True) if each.losses else ((), ())
        panel.plot(minutes, losses, label=each.title, **_style(number))
    panel.set(xlabel="minutes of training", ylabel="held-out loss")
    panel.set_xlim(left=0)
    legend_above(panel)
    save(figure, path)


def _speeds(standings: Sequence[Standing], path: Path) -> None:
    figure = Figure(figsize=(8.0, 3.2), dpi=120)
    panels = figure.subplots(1, 3, sharey=True)
    kinds = [
        ("training", [each.train_speed for each in standings]),
        ("served, one at a time", [each.alone_speed for each in standings]),
        ("served, 16 at once", [each.crowd_speed for each in standings]),
    ]
    for panel, (title, speeds) in zip(panels, kinds, strict=True):
        colors = [_style(number)["color"] for number in range(len(standings))]
        bars = panel.barh([each.title for each in standings], speeds, color=colors)
        panel.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=2, fontsize=8)
        panel.set_title(title, fontsize=10)
        panel.set_xlim(right=max(speeds) * 1.25)
        panel.set_xticks([])
        for side in ("top", "right", "bottom"):
            panel.spines[side].set_visible(False)
    panels[0].invert_yaxis()
    save(figure, path)


def _alignments(standings: Sequence[Standing], path: Path) -> None:
    """Two side by side."""
    num_rows = -(-len(standings) // 2)
    drawn = [each.alignment for each in standings if each.alignment is not None]
    most = max((len(each.rows) for each in drawn), default=1)
    figure = Figure(figsize=(11.0, num_rows * (1.6 + 0.22 * min(most, 40))), dpi=120)
    panels = figure.subplots(num_rows, 2, squeeze=False).flat
    for panel, each in zip(panels, standings, strict=False):
        _alignment(panel, each)
    for panel in list(panels)[len(standings) :]:
        panel.set_axis_off()
    save(figure, path)


def _alignment(panel: Any, standing: Standing) -> None:
    found = standing.alignment
    panel.set_title(standing.title, fontsize=11)
    if found is None:
        panel.set_axis_off()
        words = "looks at no token:\nall it knows of the source\nis one vector"
        panel.text(0.5, 0.5, words, ha="center", va="center", transform=panel.transAxes)
        return
    panel.imshow(found.weights_TS, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for axis, labels, turn in ((panel.xaxis, found.columns, 90), (panel.yaxis, found.rows, 0)):
        axis.set_ticks(range(len(labels)), labels, rotation=turn, fontsize=8, parse_math=False)
    if found.what:
        panel.set_xlabel(found.what, fontsize=8)
