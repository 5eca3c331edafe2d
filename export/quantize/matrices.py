"""Quantizes a checkpoint's matrices one at a time, and keeps what was found on disk.

Knows: which matrices there are, files of quantized ones. Does not know: how a matrix is quantized
(export/quantize/quantization.py), graphs.

The graph and its verification need the same integers at different times, and finding them is slow.
A file's name has the hash of the matrix, of the code that quantized it, and of its own content: an
export that was killed finds its files again and continues where it was.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from quill.export.operators.library import library_path
from quill.export.quantize import native, quantization, quantizers
from quill.export.quantize.mixture import FINER, Statistics, finer_rows
from quill.export.quantize.quantization import (
    Quantization,
    default_kind,
    describe,
    from_source,
    input_bits,
    is_quantized,
    quantize_floats,
)
from quill.export.quantize.quantizers import FoundKind, quantize
from quill.export.quantize.quill_layout import OperatorWeight, layout_bits
from quill.model.checkpoint import quantized_weight
from quill.model.checkpoint.checkpoint import Checkpoint, load_quantized, save_quantized
from quill.model.checkpoint.quantized_weight import FinerRows, QuantizedWeight
from quill.model.checkpoint.tensors import lazy, raw_bytes


class Recipe(NamedTuple):
    """How matrices are quantized that nobody quantized yet; those it doesn't name, by default."""

    kinds: Mapping[str, FoundKind]
    statistics: Mapping[str, Statistics]
    num_finer: Mapping[str, int]  # rows of a matrix that are in FINER, too


class QuantizedMatrices(Mapping[str, OperatorWeight]):
    """The integers of each matrix. A matrix's first reading is a tick."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        bits: Literal[4, 8],
        parts: Path,
        tick: Callable[[], None] = lambda: None,
        recipe: Recipe | None = None,
    ) -> None:
        weights = lazy(checkpoint.weights)
        self._names = [name for name in weights if is_quantized(name, len(weights.shape(name)))]
        self._checkpoint = checkpoint
        self._bits = bits
        self._parts = parts
        self._tick = tick
        self._recipe = recipe or Recipe({}, {}, {})
        self._kinds: dict[str, str] = {}
        self._found: dict[str, Mapping[str, QuantizedWeight]] = {}  # those not of the source
        self._losses: dict[str, float] = {}  # of those
        self._finer: dict[str, FinerRows] = {}

    def __getitem__(self, name: str) -> OperatorWeight:
        source = None
        if name not in self._found:
            source = from_source(self._checkpoint.quantized.get(name), self._bits)
            if source is None:
                self._found[name] = self._find(name)
                self._find_finer(name)
        if source is None:
            found = replace(self._found[name][name], finer=self._finer.get(name))
            source = OperatorWeight(found, input_bits(self._bits))
        weight = source
        if name not in self._kinds:
            self._kinds[name] = weight.weight.kind
            self._tick()
        return weight

    def _find(self, name: str) -> Mapping[str, QuantizedWeight]:
        """Quantizes a matrix, unless an export that was killed did."""
        weight_NI, moments_KCC = self._checkpoint.weights[name], None
        kind = self._recipe.kinds.get(name, default_kind(name, self._bits))
        digest = hashlib.sha256(f"{name} {kind} {weight_NI.dtype} {_CODE}".encode())
        digest.update(raw_bytes(weight_NI))
        if name in self._recipe.kinds:
            moments_KCC = self._recipe.statistics[name].moments_KCC
            digest.update(raw_bytes(moments_KCC))
        for path in self._parts.glob(f"{digest.hexdigest()},*"):
            _, loss, sha256 = path.name.split(",")
            if sha256 == _sha256(path):
                self._losses[name] = float(loss)
                return load_quantized(path)[0]
        self._parts.mkdir(parents=True, exist_ok=True)
        new = self._parts / f"new-{os.getpid()}"
        found = quantize_floats(name, weight_NI, kind, moments_KCC)
        self._losses[name] = found.loss
        save_quantized(new, {name: found.weight})
        return load_quantized(
            new.rename(self._parts / f"{digest.hexdigest()},{found.loss},{_sha256(new)}")
        )[0]

    def _find_finer(self, name: str) -> None:
        """Quantizes the rows that matter most once more. That takes no time."""
        if num := self._recipe.num_finer.get(name, 0):
            rows_M = finer_rows(self._recipe.statistics[name], num)
            weight_MI = self._checkpoint.weights[name][rows_M]
            self._finer[name] = FinerRows(rows_M, quantize(FINER, weight_MI).weight)

    def __contains__(self, name: object) -> bool:
        """Without quantizing anything; a router, say, is none of them."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def read_all(self) -> None:
        for name in self:
            self[name]

    def quantization(self) -> Quantization:
        """After all were read."""
        num_bits, num_weights = 0.0, 0
        for weight in (each.weight for each in self.values()):
            sizes = [(rows.kind, len(rows.raw_Nb) * weight.shape[1]) for rows in weight.rows()]
            num_weights += sum(size for _, size in sizes)
            if weight.finer is not None:
                sizes.append((FINER, math.prod(weight.finer.weight.shape)))
            num_bits += sum(layout_bits(kind) * size for kind, size in sizes)
        finer = {
            f"{name.removesuffix('.weight')} ({len(rows_M)} rows).weight": weight.kind
            for name, (rows_M, weight) in self._finer.items()
        }
        calibrated = bool(self._recipe.kinds)
        return Quantization(
            weights=self,
            description=describe(
                self._kinds, self._losses, num_bits / num_weights, calibrated, finer
            ),
            is_source=not self._found,
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_MODULES = (quantization, quantizers, native, quantized_weight)
_CODE = ",".join(_sha256(Path(str(module.__file__))) for module in _MODULES) + library_path().name
