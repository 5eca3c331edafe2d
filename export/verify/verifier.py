"""What verification measures of each precision's graphs, and what must hold of them.

Knows: what is recorded, limits. Does not know: what is run (export/verify/decoder_verifier.py,
export/verify/encoder_verifier.py), how graphs are made or written.
"""

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quill.export.bundle.manifest import Graphs, Invariance, Sizes, Verification
from quill.export.errors import VerificationError
from quill.export.precisions import MAX_RISE_FROM_SOURCE, PRECISIONS, Precision
from quill.export.quantize.quantization import Quantization
from quill.export.verify.held_out import HeldOut
from quill.export.verify.projection import Array
from quill.export.verify.token_scores import TokenScores
from quill.model.checkpoint.checkpoint import Checkpoint

Tick = Callable[[], None]  # one more item is done

NUM_TIMED_STEPS = 12


@dataclass(frozen=True)
class Candidate:
    """Graphs that were written and aren't verified yet."""

    directory: Path
    graphs: Graphs
    runnable: Graphs  # the graphs as this machine can run them
    quantization: Quantization | None

    @property
    def precision(self) -> Precision:
        return self.graphs.precision


@dataclass(frozen=True)
class Scored:
    """The tokens of passages, scored by the graphs and by PyTorch with the source's weights."""

    found: TokenScores
    expected: TokenScores
    kl_divergence: Array | None = None  # of each position


@dataclass(frozen=True)
class Measured:
    """What one precision's graphs computed, beside PyTorch."""

    worst_difference: float
    scored: Scored
    step_ms: float
    invariance: Invariance | None
    greedy_length: float | None = None


class Verifier(ABC):
    """PyTorch's results, and the comparison of each precision with them."""

    def __init__(self, checkpoint: Checkpoint, sizes: Sizes, text: HeldOut) -> None:
        self._checkpoint = checkpoint
        self._sizes = sizes
        self._held_out = text

    @abstractmethod
    def num_ticks(self, precision: Precision, quantization: Quantization | None) -> int:
        """Ticks that the verification of a precision takes."""

    @abstractmethod
    def _measure(self, candidate: Candidate, tick: Tick) -> Measured: ...

    def verify(self, candidate: Candidate, tick: Tick) -> Graphs:
        """The graphs with what was measured. Raises an error if they are beyond the tolerance."""
        trim_heap()
        measured = self._measure(candidate, tick)
        found, expected = measured.scored.found, measured.scored.expected
        divergence = measured.scored.kl_divergence
        verification = Verification(
            worst_difference=measured.worst_difference,
            greedy_agreement=float(np.mean(found.greedy_ids == expected.greedy_ids)),
            perplexity=found.perplexity,
            reference_perplexity=expected.perplexity,
            text=self._held_out.name,
            num_tokens=len(found.nll),
            step_ms=measured.step_ms,
            kl_divergence=None if divergence is None else float(divergence.mean()),
            greedy_length=measured.greedy_length,
        )
        return replace(candidate.graphs, verification=verification, invariance=measured.invariance)


def trim_heap() -> None:
    """Gives back what was freed: glibc kept 0.9 GB of a model of 1 billion when its weights were
    laid out."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # not glibc: nothing to be done
        trim(0)


def median_ms(steps: Sequence[Callable[[], object]]) -> float:
    """The median time of some calls, in milliseconds."""
    times = []
    for step in steps:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1000


def check_rise(candidate: Candidate, found: TokenScores, expected: TokenScores) -> None:
    """Raises an error if perplexity rises more than the precision allows."""
    allowed = PRECISIONS[candidate.precision].max_rise
    if candidate.quantization is not None and candidate.quantization.is_source:
        allowed = MAX_RISE_FROM_SOURCE
    rise = found.perplexity / expected.perplexity - 1
    if allowed is not None and not rise <= allowed:
        raise VerificationError(
            f"the {candidate.precision} graph's perplexity is {found.perplexity:.4f}, {rise:.2%} "
            f"above PyTorch's {expected.perplexity:.4f}; {allowed:.2%} is allowed"
        )


def check_default(graphs: Graphs) -> None:
    """Raises an error for graphs that no server chooses by itself."""
    if problem := graphs.quality_problem:
        raise VerificationError(problem)
