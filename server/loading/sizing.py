"""How much to serve at once, from the memory there is.

Knows: the manifest's sizes. Does not know: whose memory it is, why anybody would want more.
A person should never have to tune to start; whoever does is told what doesn't fit.
"""

from dataclasses import dataclass

from quill.export.bundle.manifest import Graphs, Manifest
from quill.server.errors import StartError
from quill.server.machine.resources import num_cores

MAX_ROWS = 32
MAX_CACHE_BYTES = 2**29
SHARE = 0.5  # of the memory left beside the weights: other programs live here too
MIN_CONTEXT = 2


@dataclass(frozen=True, kw_only=True)
class Sizing:
    max_rows: int
    context: int
    cache_bytes: int
    slot_bytes: int
    weight_bytes: int


def choose_sizes(
    manifest: Manifest,
    graphs: Graphs,
    available: int,
    *,
    max_rows: int | None,
    context: int | None,
    cache_bytes: int | None,
) -> Sizing:
    """None: as much as is sensible. What was asked for and doesn't fit is refused."""
    weight_bytes = sum(file.size for file in manifest.files if file.name == graphs.weights)
    context = _check_context(manifest, context)
    # A translation model's slot holds a source, too.
    num_sides = 1 if graphs.encoder is None else 2
    slot_bytes = num_sides * context * manifest.cache_bytes_per_token(graphs.cache_type)
    free = available - weight_bytes
    if max_rows is None:
        max_rows = max(0, min(MAX_ROWS, int(free * SHARE) // slot_bytes))
    if max_rows < 1 or max_rows * slot_bytes > free:
        raise StartError(
            _too_little(max(max_rows, 1), context, slot_bytes, weight_bytes, available)
        )
    if cache_bytes is None:
        cache_bytes = min(MAX_CACHE_BYTES, (free - max_rows * slot_bytes) // 4)
    return Sizing(
        max_rows=max_rows,
        context=context,
        cache_bytes=cache_bytes,
        slot_bytes=slot_bytes,
        weight_bytes=weight_bytes,
    )


def _check_context(manifest: Manifest, context: int | None) -> int:
    most = manifest.sizes.context
    if context is None:
        return most
    if not MIN_CONTEXT <= context <= most:
        raise StartError(
            f"--context is {context}; the model {manifest.name} allows {MIN_CONTEXT} to {most}"
        )
    return context


def _too_little(rows: int, context: int, slot: int, weights: int, available: int) -> str:
    return (
        f"{rows} slots of {context} tokens need {gigabytes(rows * slot)} beside the model's "
        f"{gigabytes(weights)}, and {gigabytes(available)} of memory is free. Lower --max-slots or "
        "--context"
    )


def choose_threads(wanted: int | None) -> int:
    """One a core. More would only wait for each other, and thousands take minutes to make."""
    most = num_cores()
    if wanted is not None and wanted > most:
        raise StartError(f"--threads is {wanted}; this process may use {most} cores")
    return wanted or most


def gigabytes(num_bytes: int) -> str:
    if num_bytes < 2**30 / 10:
        return f"{num_bytes / 2**20:.0f} MB"
    return f"{num_bytes / 2**30:.1f} GB"
