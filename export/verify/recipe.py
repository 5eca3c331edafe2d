"""Finds how a model's matrices are quantized to about 4 bits, by measuring what is lost.

Knows: the order of the search. Does not know: how losses are predicted (export/quantize/mixture.py)
or measured (export/verify/calibration.py), graphs.

Rounded inputs lose something whatever the weights are: that floor is measured, and not attributed
to them. A mixture's prediction is corrected by what its measurement shows, and another is tried.
"""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from quill.export.precisions import MAX_KL_DIVERGENCE, MAX_PERPLEXITY_RATIO
from quill.export.quantize.matrices import QuantizedMatrices, Recipe
from quill.export.quantize.mixture import MAX_BITS, Option, Statistics, choose, options
from quill.export.quantize.quantization import is_quantized
from quill.export.verify.calibration import Calibration, LossMeter
from quill.export.verify.held_out import Passage, calibration_text
from quill.export.verify.pytorch_reference import Tick
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.tensors import TensorFile, lazy

# A text's log-likelihood falls by about the KL divergence. What is measured on a few hundred tokens
# must hold on other text.
GOAL = 0.8 * min(MAX_KL_DIVERGENCE, math.log(MAX_PERPLEXITY_RATIO))
MIN_SHARE = 0.25  # of the goal for weights, if rounded inputs lose that much
FIRST_RATIO = 1.5  # of what is lost to what is predicted
NUM_MIXTURES = 3
MEASURED_EVERY = 4  # of so many passages one is kept to measure on


_LOG = logging.getLogger(__name__)


class Stage(Protocol):
    """Displays a stage of the export. Each tick: one more of `total` items is done."""

    def __call__(self, title: str, total: int | None = None) -> AbstractContextManager[Tick]: ...


def can_calibrate(checkpoint: Checkpoint) -> bool:
    """Only a causal Transformer's layers are run backwards, and only weights of full precision
    leave a choice."""
    config = checkpoint.config
    return (
        config.family == "causal"
        and config.recurrence is None
        and any(name not in checkpoint.quantized for name in _matrices(checkpoint))
    )


def _matrices(checkpoint: Checkpoint) -> list[str]:
    weights = lazy(checkpoint.weights)
    return [name for name in weights if is_quantized(name, len(weights.shape(name)))]


def find_recipe(
    checkpoint: Checkpoint, parts: Path, text: Path | None, stage: Stage
) -> Recipe | None:
    """The smallest mixture that loses little enough, as far as there is one. None: no text to
    calibrate on. `parts`: a directory for what was quantized already."""
    with stage("choosing the text to calibrate on"):
        found = calibration_text(checkpoint, text)
    if found is None:
        return None
    measured = found.passages[MEASURED_EVERY - 1 :: MEASURED_EVERY]
    others = [passage for passage in found.passages if passage not in measured]
    statistics = _calibrate(checkpoint, parts, others, stage)
    names = [name for name in statistics if name not in checkpoint.quantized]
    tried: list[list[Option]] = []
    with stage("quill4: trying kinds", len(names)) as tick:
        for name in names:
            tried.append(options(name, checkpoint.weights[name], statistics[name]))
            tick()
    with stage("quill4: measuring what rounded inputs lose"):
        meter = LossMeter(checkpoint, measured or others)
        floor = meter.floor()
    recipe = Recipe({}, statistics, {})
    _LOG.info("rounded inputs lose %.4f nats, whatever the weights are", floor)
    return _search(checkpoint, parts, recipe, tried, meter, floor, stage)


def _calibrate(
    checkpoint: Checkpoint, parts: Path, passages: Sequence[Passage], stage: Stage
) -> Mapping[str, Statistics]:
    path = parts / f"statistics-{os.getpid()}.part"
    calibration = Calibration(checkpoint, TensorFile(path, os.O_RDWR | os.O_CREAT))
    path.unlink()
    with stage("quill4: calibrating", calibration.num_calibration_ticks()) as tick:
        return calibration.statistics(passages, tick)


def _search(
    checkpoint: Checkpoint,
    parts: Path,
    recipe: Recipe,
    tried: Sequence[Sequence[Option]],
    meter: LossMeter,
    floor: float,
    stage: Stage,
) -> Recipe:
    """Mixtures, each by the measurement of the one before."""
    allowed, ratio = max(GOAL - floor, MIN_SHARE * GOAL), FIRST_RATIO
    for number in range(1, NUM_MIXTURES + 1):
        mixture = choose(tried, allowed / ratio)
        recipe = recipe._replace(kinds=mixture.kinds, num_finer=mixture.num_finer)
        title = f"quill4: mixture {number}, {mixture.bits:.2f} bits a weight"
        with stage(title, len(_matrices(checkpoint))) as tick:
            matrices = QuantizedMatrices(checkpoint, 4, parts, tick, recipe)
            matrices.read_all()
            loss = meter.loss(matrices.quantization()) - floor
        _LOG.info("%.2f bits lose %.4f nats; predicted %.4f", mixture.bits, loss, mixture.loss)
        if loss <= allowed or mixture.bits > 0.99 * MAX_BITS:  # another would be the same
            break
        ratio = loss / max(mixture.loss, 1e-9)
    return recipe
