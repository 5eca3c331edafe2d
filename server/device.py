"""Chooses where the model runs and in which precision.

Knows: what the runtime offers, what the bundle has. Does not know: how graphs are run.
Never in silence: what was asked for and can't be had is an error, what was chosen is said.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from export.manifest import Graphs, Manifest
from export.operator_library import operators_are_fast, operators_problem
from server.errors import StartError
from server.opening import cuda_problem
from server.processor import multiplies_integers

# A precision goes before another where it is faster, if export has measured that it is as good.
# quill4 is fastest for every number of rows, where its operators are built; for translators by next
# to nothing, so int8, which loses less of weights that came in full precision, goes before it
# there. Of the runtime's own,
# int4 is fastest for a row or two; int8 for many and for prompts, on processors that can multiply
# integers. On others it is slower, and its kernel may overflow.
PREFERRED = ("int8", "int4", "fp32") if multiplies_integers() else ("int4", "fp32", "int8")
OWN = "quill4"
MAX_PERPLEXITY_RATIO = 1.02
MAY_OVERFLOW = (
    "int8 on a processor that isn't known to sum products of 8-bit integers in 32 bits (VNNI): "
    "sums may overflow, and answers be worse than the bundle's perplexity says. --precision int4 "
    "and fp32 are safe"
)


@dataclass(frozen=True)
class Choice:
    graphs: Graphs
    why: str  # for the log
    warning: str | None = None  # for the log, too: what may go wrong


def choose_graphs(
    manifest: Manifest,
    device: str,
    precision: str | None,
    find_problem: Callable[[], str | None] = cuda_problem,
) -> Choice:
    """`device` is auto, cpu or cuda; `precision` None: the best for the device."""
    if device == "cpu":
        return _on_cpu(manifest, precision, "as asked")
    on_cuda: dict[str, Graphs] = {
        graphs.precision: graphs for graphs in manifest.graphs if graphs.device == "cuda"
    }
    problem = _fitting_problem(manifest, list(on_cuda), precision) or find_problem()
    if problem is None:
        why = "as asked" if device == "cuda" else "CUDA works here"
        return Choice(on_cuda[precision or "fp16"], f"{why}; no prefix cache there")
    if device == "cuda" or precision in on_cuda:
        raise StartError(
            f"CUDA can't be used: {problem}. It takes an NVIDIA card with its driver, CUDA 13, "
            "cuDNN 9, and a bundle with fp16 graphs. Or use --device cpu"
        )
    return _on_cpu(manifest, precision, f"without CUDA: {problem}")


def _fitting_problem(
    manifest: Manifest, on_cuda: Sequence[str], precision: str | None
) -> str | None:
    """Why this bundle can't run on CUDA, wherever it is."""
    if manifest.family != "causal":
        return "translation models are served on the CPU only"
    if not on_cuda:
        return "the bundle has no fp16 graphs"
    if precision is not None and precision not in on_cuda:
        return f"{precision} is for the CPU"
    return None


def _on_cpu(manifest: Manifest, precision: str | None, why: str) -> Choice:
    on_cpu: dict[str, Graphs] = {
        graphs.precision: graphs for graphs in manifest.graphs if graphs.device == "cpu"
    }
    known = ", ".join(on_cpu) or "none"
    if precision == OWN and (problem := operators_problem()) is not None:
        raise StartError(f"--precision {precision} can't be had: {problem}. Or choose another")
    if precision is not None:
        if precision not in on_cpu:
            raise StartError(
                f"--precision {precision} isn't among this bundle's graphs for the CPU ({known}). "
                "Choose another, or export the bundle with it"
            )
        return _warned(Choice(on_cpu[precision], why))
    if not on_cpu:
        raise StartError(
            f"the bundle has no graphs for the CPU ({why}). Export it with --precision fp32"
        )
    own_first = manifest.family == "causal" and operators_are_fast()
    order = (OWN, *PREFERRED) if own_first else (*PREFERRED, OWN)
    best = min(on_cpu.values(), key=lambda each: (not _is_good(each), order.index(each.precision)))
    if best.precision != OWN and manifest.family == "causal":
        against = _against_own(on_cpu.get(OWN))
        why += f"; not {OWN}: {against}" if against is not None else ""
    return _warned(Choice(best, why))


def _against_own(graphs: Graphs | None) -> str | None:
    """Why the fastest wasn't chosen. None: there is none, and none could be had."""
    problem = operators_problem()
    if graphs is None:
        return None if problem else "the bundle has none; export it again"
    if problem is not None:
        return problem
    if not operators_are_fast():
        return "no fast kernels here"
    return "its perplexity is too high" if graphs.verification else "it was never verified"


def _warned(choice: Choice) -> Choice:
    if choice.graphs.precision == "int8" and not multiplies_integers():
        return replace(choice, warning=MAY_OVERFLOW)
    return choice


def _is_good(graphs: Graphs) -> bool:
    if graphs.precision == "fp32":
        return True
    proof = graphs.verification
    return (
        proof is not None and proof.perplexity <= MAX_PERPLEXITY_RATIO * proof.reference_perplexity
    )
