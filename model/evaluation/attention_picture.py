"""Draws attention weights as a grid of maps: a row of maps for each layer, a column for each head.

Knows: matplotlib, fonts, how large a picture may be. Does not know: networks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from quill.model.checkpoint.atomic import atomic_file
from quill.model.data.tokenizer import Tokenizer
from quill.model.errors import RequestError

# N heads · T tokens that look · S tokens looked at

WeightsArray = npt.NDArray[np.float32]

DPI = 120
MAX_PIXELS = 60_000_000
MAX_SIDE_PIXELS = 30_000  # Agg draws no more than 65,536 on a side
MAX_LABEL_LENGTH = 14
MARGIN_INCHES = 1.6  # labels, titles, the colour bar
OUT_OF_SIGHT = "0.85"  # a light grey
MAX_CHARACTER_BYTES = 4  # in UTF-8, so no more tokens than these share a character
HALF_CHARACTER = "\ufffd"  # what the bytes of an unfinished character are decoded to
VISIBLE = {" ": "·", "\n": "↵", "\t": "→"}


@dataclass(frozen=True)
class AttentionGrid:
    """What a picture shows."""

    title: str
    row_caption: str
    column_caption: str
    row_labels: list[str]
    column_labels: list[str]
    layers: list[int]
    heads: list[int]
    weights: list[WeightsArray]  # of each chosen layer, all its heads: (N, T, S); NaN out of sight


class Size(NamedTuple):
    """Inches, overall and of one cell: one token looking at one other."""

    width: float
    height: float
    cell: float


def picture_size(num_layers: int, num_heads: int, num_sequences: int, num_columns: int) -> Size:
    """Large cells for a few tokens, never smaller than their labels need; or a refusal."""
    num_tokens = max(num_sequences, num_columns)
    cell = min(0.22, max(0.11, 3.3 / num_tokens))
    width = num_heads * (num_columns * cell + 0.15) + MARGIN_INCHES
    height = num_layers * (num_sequences * cell + 1.1) + 0.8
    num_pixels = width * height * DPI**2
    if num_pixels > MAX_PIXELS or max(width, height) * DPI > MAX_SIDE_PIXELS:
        raise RequestError(
            f"the picture would have {width * DPI:,.0f} x {height * DPI:,.0f} pixels, for "
            f"{num_layers} layers, {num_heads} heads and {num_tokens} tokens; choose fewer with "
            "--layers and --heads, or a shorter text"
        )
    return Size(width, height, cell)


def token_labels(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Each token as a person can read it. Tokens that share a character are numbered: é 1/2."""
    labels: list[str] = []
    while len(labels) < len(ids):
        first = len(labels)
        size = _group_size(tokenizer, ids[first : first + MAX_CHARACTER_BYTES])
        text = _readable(tokenizer.decode(ids[first : first + size]))
        labels += [text] if size == 1 else [f"{text} {n + 1}/{size}" for n in range(size)]
    return labels


def _group_size(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """How many of the next tokens make whole characters; 1 if they never do."""
    for size in range(1, len(ids) + 1):
        if HALF_CHARACTER not in tokenizer.decode(ids[:size]):
            return size
    return 1


def _readable(text: str) -> str:
    """One line, with spaces and line ends made visible."""
    text = shortened(text, MAX_LABEL_LENGTH)
    return printable("".join(VISIBLE.get(character, character) for character in text))


def shortened(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def printable(text: str) -> str:
    """Characters that the font lacks become their numbers; matplotlib would warn of each."""
    glyphs = _glyphs()
    return "".join(c if ord(c) in glyphs and c.isprintable() else f"U+{ord(c):04X}" for c in text)


@cache
def _glyphs() -> frozenset[int]:
    font = font_manager.get_font(font_manager.findfont(font_manager.FontProperties()))
    return frozenset(font.get_charmap())


def draw(grid: AttentionGrid, path: Path) -> None:
    """Writes the picture, whole or not at all."""
    if path.suffix.lower() != ".png":
        raise RequestError(f"the picture is a PNG; {path} should end in .png")
    figure = _figure(grid)
    try:
        with atomic_file(path) as temporary:
            figure.savefig(temporary, format="png", dpi=DPI)
    except OSError as error:
        raise RequestError(f"can't write the picture {path}: {error}") from error


def _figure(grid: AttentionGrid) -> Figure:
    size = picture_size(
        len(grid.layers), len(grid.heads), len(grid.row_labels), len(grid.column_labels)
    )
    figure = Figure(figsize=(size.width, size.height), layout="constrained")
    axes = figure.subplots(len(grid.layers), len(grid.heads), squeeze=False)
    for axes_row, layer, weights_NTS in zip(axes, grid.layers, grid.weights, strict=True):
        for one, head in zip(axes_row, grid.heads, strict=True):
            image = _draw_map(one, weights_NTS[head], f"layer {layer} · head {head}")
    for one in axes.flat:
        _label(one.xaxis, grid.column_labels, size.cell, rotation=90)
    for one in axes[:, 0]:
        _label(one.yaxis, grid.row_labels, size.cell, rotation=0)
    _explain(figure, axes, image, grid)
    return figure


def _draw_map(axes: Axes, weights_TS: WeightsArray, title: str) -> AxesImage:
    # The square root lets faint weights show.
    image = axes.imshow(
        weights_TS,
        cmap=matplotlib.colormaps["Blues"].with_extremes(bad=OUT_OF_SIGHT),
        norm=PowerNorm(0.5, 0.0, 1.0),
        interpolation="nearest",
    )
    axes.set_title(title, fontsize=8)
    axes.set_xticks([])
    axes.set_yticks([])
    return image


def _label(axis: Axis, labels: list[str], cell: float, rotation: int) -> None:
    points = min(9.0, cell * 72 * 0.75)
    axis.set_ticks(range(len(labels)), labels, rotation=rotation, fontsize=points, parse_math=False)


def _explain(
    figure: Figure, axes: npt.NDArray[np.object_], image: AxesImage, grid: AttentionGrid
) -> None:
    width, height = figure.get_size_inches()
    title = shortened(" ".join(grid.title.split()), int(width * 12))  # twelve characters an inch
    figure.suptitle(printable(title), fontsize=11, parse_math=False)
    figure.supylabel(grid.row_caption, fontsize=9)
    figure.supxlabel(grid.column_caption, fontsize=9)
    bar = figure.colorbar(
        image,
        ax=axes,
        ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 1],
        fraction=0.25 / width,
        pad=0.15 / width,
        shrink=min(1.0, 4.0 / height),
        aspect=20,
    )
    bar.set_label("attention weight (grey: out of sight)", fontsize=9)
    bar.ax.tick_params(labelsize=8)
