"""Chooses where the model runs and in which precision.

Knows: what the runtime offers, what the bundle has. Does not know: how graphs are run.
Never in silence: what was asked for and can't be had is an error, what was chosen is said.
"""

from dataclasses import dataclass

import onnxruntime

from export.manifest import Graphs, Manifest
from server.errors import StartError

# On the CPU int4 is some three times as fast for few rows. It goes first where export has measured
# that it is as good.
PREFERRED = ("int4", "fp32", "int8")
MAX_PERPLEXITY_RATIO = 1.02


@dataclass(frozen=True)
class Choice:
    graphs: Graphs
    why: str  # for the log


def choose_graphs(manifest: Manifest, device: str, precision: str | None) -> Choice:
    """`device` is auto, cpu or cuda; `precision` None: the best for the device."""
    if device == "cuda":
        raise StartError(_cuda_problem())
    why = "as asked" if device == "cpu" else "this version of Quill serves on the CPU only"
    on_cpu = {graphs.precision: graphs for graphs in manifest.graphs if graphs.device == "cpu"}
    known = ", ".join(on_cpu) or "none"
    if precision is not None:
        if precision not in on_cpu:
            raise StartError(
                f"--precision {precision} isn't among this bundle's graphs for the CPU ({known}). "
                "Choose another, or export the bundle with it"
            )
        return Choice(on_cpu[precision], why)
    if not on_cpu:
        raise StartError("the bundle has no graphs for the CPU. Export it with --precision fp32")
    graphs = sorted(on_cpu.values(), key=_rank)[0]
    return Choice(graphs, why)


def _rank(graphs: Graphs) -> tuple[bool, int]:
    return not _is_good(graphs), PREFERRED.index(graphs.precision)


def _is_good(graphs: Graphs) -> bool:
    if graphs.precision == "fp32":
        return True
    proof = graphs.verification
    return (
        proof is not None and proof.perplexity <= MAX_PERPLEXITY_RATIO * proof.reference_perplexity
    )


def _cuda_problem() -> str:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return (
            "this ONNX Runtime has no CUDA provider. Install onnxruntime-gpu, CUDA 13 and cuDNN 9, "
            "or use --device cpu"
        )
    return "this version of Quill serves on the CPU only. Use --device cpu"
