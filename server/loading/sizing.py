"""How much to serve at once, from the memory there is.

Knows: the manifest's sizes. Does not know: whose memory it is, why anybody would want more.
A person should never have to tune to start; whoever does is told what doesn't fit.
"""

from dataclasses import dataclass

from quill.export.bundle import graph_contract
from quill.export.bundle.manifest import Graphs, Manifest
from quill.server.engine.kv_cache import BlockShape
from quill.server.errors import StartError
from quill.server.machine.resources import num_cores

MAX_ROWS = 256
MAX_CACHE_BYTES = 2**31  # unless one sequence needs more
SHARE = 0.5  # of the memory left beside the weights: other programs live here too
MIN_CONTEXT = 2


@dataclass(frozen=True, kw_only=True)
class Sizing:
    max_num_seqs: int
    context: int
    num_blocks: int
    block_bytes: int
    weight_bytes: int

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def choose_sizes(
    manifest: Manifest,
    graphs: Graphs,
    available: int,
    *,
    max_num_seqs: int | None,
    context: int | None,
    cache_bytes: int | None,
) -> Sizing:
    """None: as much as is sensible. What was asked for and doesn't fit is refused."""
    weight_bytes = sum(file.size for file in manifest.files if file.name == graphs.weights)
    context = _check_context(manifest, context)
    if graphs.decoder is None:
        return _for_encoder(context, max_num_seqs, cache_bytes, weight_bytes)
    block_bytes = BlockShape.of(manifest.sizes, graphs).num_bytes
    least = blocks_of_one(graphs, context)
    free = available - weight_bytes
    wanted = cache_bytes
    if wanted is None:
        wanted = min(max(MAX_CACHE_BYTES, least * block_bytes), int(free * SHARE))
    num_blocks = wanted // block_bytes
    if num_blocks < least or wanted > free:
        asked = gigabytes(max(wanted, least * block_bytes))
        raise StartError(
            f"{asked} for keys and values beside the model's {gigabytes(weight_bytes)} is more "
            f"than the {gigabytes(available)} of memory that are free, or too little for a context "
            f"of {context} tokens ({gigabytes(least * block_bytes)}). Lower --context, or choose "
            "another --kv-cache-mb"
        )
    return Sizing(
        max_num_seqs=MAX_ROWS if max_num_seqs is None else max_num_seqs,
        context=context,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        weight_bytes=weight_bytes,
    )


def _for_encoder(
    context: int, max_num_seqs: int | None, cache_bytes: int | None, weight_bytes: int
) -> Sizing:
    if cache_bytes is not None:
        raise StartError("an encoder keeps no keys and values. Leave --kv-cache-mb out")
    rows = MAX_ROWS if max_num_seqs is None else max_num_seqs
    return Sizing(
        max_num_seqs=rows, context=context, num_blocks=0, block_bytes=0, weight_bytes=weight_bytes
    )


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


def gigabytes(num_bytes: int) -> str:
    if num_bytes < 2**30 / 10:
        return f"{num_bytes / 2**20:.0f} MB"
    return f"{num_bytes / 2**30:.1f} GB"
