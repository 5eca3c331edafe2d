"""What a run measured: JSON lines, and the plot of the loss.

Knows: the lines and the picture. Does not know: how the numbers came about.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quill.model.checkpoint.atomic import atomic_file
from quill.model.errors import ModelError

CURVE_FILE = "loss.png"


@dataclass(frozen=True)
class Measurement:
    """One line of the log. `held_out_loss` is there where the held-out text was scored."""

    step: int
    loss: float  # nats a token, mean since the last line; with label smoothing if it is on
    learning_rate: float
    gradient_norm: float
    tokens_per_s: float
    elapsed_s: float
    held_out_loss: float | None = None  # nats a token, without label smoothing
    held_out_bits_per_byte: float | None = None
    held_out_accuracy: float | None = None  # of an encoder: the share of hidden tokens found


def append_measurement(path: Path, measurement: Measurement) -> None:
    entry = {key: value for key, value in asdict(measurement).items() if value is not None}
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    except OSError as error:
        raise ModelError(f"can't write the training log {path}: {error}") from error


def read_measurements(path: Path) -> list[Measurement]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Measurement(**json.loads(line)) for line in lines]


def draw_curve(measurements: list[Measurement], path: Path, title: str) -> None:
    """The loss in training and on held-out text against the step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    _draw_lines(axes, measurements)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    _draw_accuracy(axes, measurements)
    try:
        with atomic_file(path) as temporary:
            figure.savefig(temporary, format="png", dpi=120)
    except OSError as error:
        raise ModelError(f"can't write the loss curve {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _draw_lines(axes: Any, measurements: list[Measurement]) -> None:
    # Blue and orange of Okabe and Ito: a colour-blind person can tell them apart.
    steps = [m.step for m in measurements]
    axes.plot(steps, [m.loss for m in measurements], color="#56B4E9", label="training")
    held_out = [(m.step, m.held_out_loss) for m in measurements if m.held_out_loss is not None]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#D55E00", label="held out")
        last_step, last_loss = held_out[-1]
        axes.annotate(
            f"{last_loss:.3f}",
            (last_step, last_loss),
            textcoords="offset points",
            xytext=(0, 8),
            ha="right",
        )
    finite = [m.loss for m in measurements if math.isfinite(m.loss)]
    if finite:
        axes.set_ylim(top=max(finite[len(finite) // 50 :]) * 1.02)


def _draw_accuracy(axes: Any, measurements: list[Measurement]) -> None:
    """On a second axis, on the right."""
    found = [
        (m.step, 100 * m.held_out_accuracy) for m in measurements if m.held_out_accuracy is not None
    ]
    if not found:
        return
    right = axes.twinx()
    right.plot(*zip(*found, strict=True), "s--", color="#009E73", label="held out, found")
    right.set_ylabel("hidden tokens found (%)")
    right.set_ylim(0, 100)
    right.annotate(
        f"{found[-1][1]:.1f}%", found[-1], textcoords="offset points", xytext=(0, 8), ha="right"
    )
    right.legend(loc="lower right")
