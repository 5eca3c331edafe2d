"""The training loop: steps, measurements, samples, checkpoints, and a stop in good order.

Knows: when each of them is due, signals. Does not know: gradients, corpora, arguments.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.run_directory import LOG_FILE, save_step
from quill.model.data.batches import Batch
from quill.model.network.network import Network
from quill.model.progress import Display
from quill.model.training.distributed import Peers
from quill.model.training.log import (
    CURVE_FILE,
    Measurement,
    append_measurement,
    draw_curve,
    read_measurements,
)
from quill.model.training.recipes import Recipe
from quill.model.training.scoring import Score
from quill.model.training.task import Task
from quill.model.training.trainer import StepResult, Trainer

SAMPLES_FILE = "samples.txt"
LOG_EVERY = 25


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    num_steps: int
    finished: bool  # all steps are done and the last score is known
    checkpoint: Path
    score: Score | None  # of the whole held-out text, if the run finished


class Stopwatch:
    """Tokens a second since it was last read."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._num_tokens = 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def read(self) -> float:
        now = time.monotonic()
        rate = self._num_tokens / max(now - self._last, 1e-9)
        self._last, self._num_tokens = now, 0
        return rate

    def restart(self) -> None:
        """Leaves out what has passed since the last reading: evaluation isn't training."""
        self._last = time.monotonic()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM raise a flag, so that the step can finish. A second one ends at once."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, previous[each])

    previous = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: stopped
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


class _StoppedError(Exception):
    """A signal arrived while held-out data was scored."""


class Run:
    """Takes a trainer through its recipe. Only the leading process writes."""

    def __init__(
        self,
        path: Path,
        trainer: Trainer,
        task: Task,
        recipe: Recipe,
        peers: Peers,
        provenance: dict[str, Any],
    ) -> None:
        self._path = path
        self._trainer = trainer
        self._task = task
        self._recipe = recipe
        self._peers = peers
        self._provenance = provenance
        self._stopwatch = Stopwatch()
        self._results: list[StepResult] = []
        self._held_out: Score | None = None
        self._is_stopped: Callable[[], bool] = lambda: False

    def go(self) -> Outcome:
        title = self._path.name
        with (
            stop_on_signals() as self._is_stopped,
            Display(title, self._recipe.num_steps, quiet=not self._peers.leads) as display,
        ):
            display.start_at(self._trainer.step)
            self._stopwatch.restart()
            while self._trainer.step < self._recipe.num_steps:
                if self._peers.any(self._is_stopped()):
                    return self._stop_early(display)
                self._results.append(self._trainer.run_step())
                self._after_step(display)
            return self._finish(display)

    def _after_step(self, display: Display) -> None:
        result = self._results[-1]
        self._stopwatch.count(result.num_tokens)
        step = self._trainer.step
        last = step == self._recipe.num_steps
        evaluates = step % self._recipe.evaluate_every == 0 or last
        if step % LOG_EVERY == 0 or evaluates:
            self._measure(display, evaluates)
        if step % self._recipe.save_every == 0 and not last:
            self._save()
            self._stopwatch.restart()

    def _measure(self, display: Display, evaluates: bool) -> None:
        """A line of the log; on evaluation also the held-out loss, a sample and the curve."""
        rate = self._stopwatch.read()
        score = self._evaluate(display) if evaluates and self._peers.leads else None
        result = self._results[-1]
        measurement = Measurement(
            step=result.step,
            loss=sum(r.loss for r in self._results) / len(self._results),
            learning_rate=result.learning_rate,
            gradient_norm=result.gradient_norm,
            tokens_per_s=rate,
            elapsed_s=self._stopwatch.elapsed_s,
            held_out_loss=None if score is None else score.loss,
            held_out_bits_per_byte=None if score is None else score.bits_per_byte,
            held_out_accuracy=None if score is None else score.accuracy,
        )
        self._results.clear()
        if self._peers.leads:
            append_measurement(self._path / LOG_FILE, measurement)
            display.update(result.step, self._numbers(measurement))
            if evaluates:
                self._draw()
        self._stopwatch.restart()

    def _evaluate(self, display: Display) -> Score | None:
        """None if the run is to stop: then this measurement does without."""
        model = self._eval_model()
        try:
            self._held_out = self._score(display, quick=True)
        except _StoppedError:
            return None
        sample = self._task.sample(model, seed=self._trainer.step)
        heading = f"── step {self._trainer.step}, held-out loss {self._held_out.loss:.3f} ──"
        display.print(f"{heading}\n{sample}\n")
        with (self._path / SAMPLES_FILE).open("a", encoding="utf-8") as file:
            file.write(f"{heading}\n{sample}\n\n")
        return self._held_out

    def _score(self, display: Display, quick: bool) -> Score:
        def watch(batches: list[Batch]) -> Iterator[Batch]:
            for batch in display.track(batches, "held-out"):
                if self._is_stopped():
                    raise _StoppedError
                yield batch

        return self._task.score(self._eval_model(), self._peers.device, quick, watch)

    def _numbers(self, measurement: Measurement) -> str:
        held_out = "" if self._held_out is None else f"  held-out {self._held_out.loss:.3f}"
        return (
            f"loss {measurement.loss:.3f}{held_out}  {measurement.tokens_per_s:,.0f} tok/s  "
            f"lr {measurement.learning_rate:.1e}"
        )

    def _draw(self) -> None:
        measurements = read_measurements(self._path / LOG_FILE)
        draw_curve(measurements, self._path / CURVE_FILE, f"Training {self._path.name}")

    def _save(self) -> Path:
        path = self._path / f"step-{self._trainer.step:08d}"
        if self._peers.leads:
            path = save_step(
                self._path, self._checkpoint(), self._trainer.state(), self._recipe.keep_checkpoints
            )
        return path

    def _checkpoint(self) -> Checkpoint:
        model = self._trainer.model
        special = self._task.tokenizer.special
        is_encoder = model.config.family == "encoder"
        return Checkpoint(
            config=model.config,
            weights={name: tensor.detach().cpu() for name, tensor in model.state_dict().items()},
            tokenizer=self._task.tokenizer,
            special_tokens=special,
            prepend_bos=is_encoder,
            append_eos=is_encoder,
            stop_ids=() if special.eos is None or is_encoder else (special.eos,),
            # A translation is greedy by default.
            generation={"temperature": 0.0} if model.config.family == "seq2seq" else {},
            provenance=self._provenance,
        )

    def _eval_model(self) -> Network:
        return self._trainer.model.eval()

    def _stop_early(self, display: Display) -> Outcome:
        checkpoint = self._save()
        display.print(f"Stopped after step {self._trainer.step}; saved {checkpoint}")
        return Outcome(self._trainer.step, False, checkpoint, None)

    def _finish(self, display: Display) -> Outcome:
        """Who stops it while it scores has all steps, and gets the score by resuming."""
        checkpoint = self._save()
        if not self._peers.leads:
            return Outcome(self._trainer.step, True, checkpoint, None)
        display.print("Scoring the whole held-out text …")
        try:
            score = self._score(display, quick=False)
        except _StoppedError:
            display.print(f"Stopped while scoring; all steps are done and saved: {checkpoint}")
            return Outcome(self._trainer.step, False, checkpoint, None)
        return Outcome(self._trainer.step, True, checkpoint, score)
