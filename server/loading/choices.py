"""Chooses what the user didn't: the device, the precision, the sizes of the KV cache and the batch.

Knows: what ONNX Runtime offers, what the bundle has, the memory there is. Does not know: how graphs
run. An option that can't be had is an error, never a silent replacement; choices are logged.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quill.export.bundle import graph_contract
from quill.export.bundle.manifest import Graphs, Manifest
from quill.export.operators.library import operators_are_fast, operators_problem
from quill.export.precisions import PRECISIONS, Family, Precision, preferred
from quill.server.engine.kv_cache import BlockShape
from quill.server.errors import StartError
from quill.server.machine.onnx_session import cuda_problem
from quill.server.machine.resources import num_cores
from quill.server.request import Limits, encoder_limits
from quill.server.settings import Settings

MAX_NUM_SEQS = 256
MAX_CACHE_BYTES = 2**31  # unless one sequence needs more
SHARE = 0.5  # of the memory left beside the weights: other programs live here too
MIN_CONTEXT = 2


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
        return _on_cpu(manifest, precision, "as chosen")
    on_cuda: dict[str, Graphs] = {
        graphs.precision: graphs for graphs in manifest.graphs if graphs.device == "cuda"
    }
    problem = _fitting_problem(manifest, list(on_cuda), precision) or find_problem()
    if problem is None:
        why = "as chosen" if device == "cuda" else "CUDA works here"
        return Choice(on_cuda[precision or "fp16"], why)
    if device == "cuda" or precision in on_cuda:
        raise _cuda_error(problem)
    return _on_cpu(manifest, precision, f"without CUDA: {problem}")


def check_device(device: str, precisions: str) -> None:
    """Raises what no bundle could change, before one is exported. `precisions`: with commas."""
    wanted = {name for name in precisions.split(",") if name}
    on_cuda = [name for name in PRECISIONS if name in wanted and PRECISIONS[name].device == "cuda"]
    if device == "cpu" and on_cuda:
        raise StartError(f"--precision {on_cuda[0]} is for CUDA. Leave it out, or --device cpu")
    if device == "cuda" and len(on_cuda) < len(wanted):
        raise _cuda_error(f"{precisions} is for the CPU")
    if (device == "cuda" or on_cuda) and (problem := cuda_problem()):
        raise _cuda_error(problem)


def _cuda_error(problem: str) -> StartError:
    return StartError(
        f"CUDA can't be used: {problem}. It takes an NVIDIA card with its driver, CUDA 13, "
        "cuDNN 9, and a bundle with fp16 graphs. Or use --device cpu"
    )


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
    return f"add it to the bundle: quill export SOURCE --out BUNDLE --add --precision {precision}"


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


def choose_limits(manifest: Manifest, graphs: Graphs, available: int, settings: Settings) -> Limits:
    """What isn't set is as large as is sensible. An option that doesn't fit is an error."""
    context = _check_context(manifest, settings.context)
    max_num_seqs = settings.max_num_seqs or MAX_NUM_SEQS
    if graphs.decoder is None:
        if settings.kv_cache_mb is not None:
            raise StartError("an encoder has no KV cache: leave out --kv-cache-mb")
        return encoder_limits(max_num_seqs=max_num_seqs, context=context)
    return Limits(
        max_num_seqs=max_num_seqs,
        context=context,
        num_blocks=_num_blocks(manifest, graphs, available, context, settings.kv_cache_mb),
        block_size=graph_contract.block_size(graphs.device),
        prefix_caching=settings.prefix_cache,
        speculative=settings.speculative and not graphs.one_token_steps,
        one_token_steps=graphs.one_token_steps,
    )


def _num_blocks(
    manifest: Manifest, graphs: Graphs, available: int, context: int, cache_mb: int | None
) -> int:
    block_bytes = BlockShape.of(manifest.sizes, graphs).num_bytes
    least = blocks_of_one(graphs, context)
    model = weight_bytes(manifest, graphs)
    free = available - model
    wanted = min(max(MAX_CACHE_BYTES, least * block_bytes), int(free * SHARE))
    if cache_mb is not None:
        wanted = cache_mb * 2**20
    num_blocks = wanted // block_bytes
    needed = f"a sequence of {context} tokens needs {_exact(least * block_bytes)} of KV cache"
    if num_blocks < least and cache_mb is not None:
        raise StartError(
            f"--kv-cache-mb is {cache_mb}; {needed}. Give more, or a smaller --context"
        )
    if num_blocks < least or wanted > free:
        raise StartError(
            f"{_exact(available)} of memory are free, the model takes {_exact(model)}, and "
            f"{needed}. Give a smaller --kv-cache-mb or --context, or free some memory"
        )
    return num_blocks


def weight_bytes(manifest: Manifest, graphs: Graphs) -> int:
    return sum(file.size for file in manifest.files if file.name == graphs.weights)


def blocks_of_one(graphs: Graphs, context: int) -> int:
    """What the longest sequence needs. A translation has a source, too."""
    num_sides = 1 if graphs.encoder is None else 2
    return num_sides * -(-context // graph_contract.block_size(graphs.device))


def _check_context(manifest: Manifest, context: int | None) -> int:
    most = manifest.sizes.context
    if context is None:
        return most
    if not MIN_CONTEXT <= context <= most:
        raise StartError(
            f"--context is {context}; the model {manifest.name} allows {MIN_CONTEXT} to {most}"
        )
    return context


def choose_threads(wanted: int | None) -> int:
    """One a core. More would only wait for each other, and thousands take minutes to make."""
    most = num_cores()
    if wanted is not None and wanted > most:
        raise StartError(f"--threads is {wanted}; this process may use {most} cores")
    return wanted or most


def megabytes(num_bytes: int) -> str:
    if num_bytes < 2**30 / 10:
        return f"{num_bytes / 2**20:.0f} MB"
    return f"{num_bytes / 2**30:.1f} GB"


def _exact(num_bytes: int) -> str:
    """Where --kv-cache-mb is compared with it: a rounded number of GB could be either's."""
    return f"{math.ceil(num_bytes / 2**20):,} MB"
