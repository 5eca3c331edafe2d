"""Chooses where the model runs and in which precision.

Knows: what the runtime offers, what the bundle has. Does not know: how graphs are run.
Never in silence: what was asked for and can't be had is an error, what was chosen is said.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quill.export.bundle.manifest import Graphs, Manifest
from quill.export.operators.library import operators_are_fast, operators_problem
from quill.export.precisions import Family, Precision, preferred
from quill.server.errors import StartError
from quill.server.machine.onnx_session import cuda_problem


@dataclass(frozen=True)
class Choice:
    graphs: Graphs
    why: str  # for the log


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
        return Choice(on_cuda[precision or "fp16"], why)
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
        return only_on_cpu(manifest.family)
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
    problem = operators_problem()
    if problem is not None:
        raise StartError(f"nothing can be served on the CPU: {problem}")
    if precision is not None:
        if precision not in on_cpu:
            raise StartError(
                f"--precision {precision} isn't among this bundle's graphs for the CPU ({known}). "
                f"Choose another, or {how_to_add(precision)}"
            )
        return Choice(on_cpu[precision], why)
    if not on_cpu:
        raise StartError(f"the bundle has no graphs for the CPU ({why}). Or {how_to_add('fp32')}")
    order = preferred(manifest.family, fast_operators=operators_are_fast())
    best = min(on_cpu.values(), key=lambda each: (not each.is_good, order.index(each.precision)))
    against = _against(ideal(manifest.family), best, on_cpu)
    return Choice(best, why if against is None else f"{why}; {against}")


def only_on_cpu(family: Family) -> str:
    models = "encoders" if family == "encoder" else "translation models"
    return f"{models} are served on the CPU only"


def ideal(family: Family) -> Precision:
    """What is served where nothing stands against it."""
    return preferred(family, fast_operators=True)[0]


def how_to_add(precision: str) -> str:
    return (
        f"add it to the bundle: quill export CHECKPOINT --out BUNDLE --add --precision {precision}"
    )


def _against(wanted: Precision, best: Graphs, on_cpu: dict[str, Graphs]) -> str | None:
    """Why the fastest wasn't chosen. None: it was, or there is none and none could be had."""
    graphs = on_cpu.get(wanted)
    if best.precision == wanted:
        return None
    if graphs is None:
        reason = f"the bundle has none; {how_to_add(wanted)}"
    elif not operators_are_fast():
        reason = "no fast kernels here"
    else:
        reason = "its perplexity is too high" if graphs.verification else "it was never verified"
    return f"not {wanted}: {reason}"


def takes_cuda(device: str) -> bool:
    return device == "cuda" or (device == "auto" and cuda_problem() is None)


def best_here(manifest: Manifest) -> str:
    """What this machine would serve, but for what was tried and was not good enough."""
    return next(
        name
        for name in preferred(manifest.family, fast_operators=operators_are_fast())
        if name not in manifest.left_out
    )
