"""Decides whether a model can be exported in a precision: the only place that decides it.

Knows: the shapes that the operators compute, the blocks of quantization, what CUDA lacks.
Does not know: weights, graphs, files.
"""

from typing import NamedTuple

from quill.export.errors import ExportError, UnsupportedModelError
from quill.export.graph.attention import HEAD_SIZE_STEP, MAX_GROUP, MAX_HEAD_SIZE
from quill.export.operators.library import operators_problem
from quill.export.precisions import PRECISIONS, Precision
from quill.export.quantize.quill_layout import COLUMNS
from quill.model.checkpoint.quantized_weight import BLOCK_SIZE
from quill.model.network.config import ModelConfig

MIN_CONTEXT = 16  # enough to verify a few steps after a prompt


class Problem(NamedTuple):
    """Why there are no such graphs, and which error reports it."""

    reason: str
    error: type[ExportError] = ExportError


def exportability(
    config: ModelConfig, precision: Precision, *, verify: bool = False
) -> Problem | None:
    """The reason why the model can't be exported in the precision; None if it can.

    `verify`: the graphs must run on this machine, too, so the operators must be built.
    """
    if reason := _shape_reason(config):
        return Problem(reason, UnsupportedModelError)
    info = PRECISIONS[precision]
    reason = _cuda_reason(config, precision) if info.device == "cuda" else None
    if reason is None and info.is_quantized:
        reason = _block_reason(config)
    if reason is None and verify:
        reason = operators_problem()
    return None if reason is None else Problem(reason)


def check_exportable(config: ModelConfig, precision: Precision) -> None:
    """Raises an error for a model that can't be exported in the precision."""
    if problem := exportability(config, precision):
        raise UnsupportedModelError(problem.reason)


def _shape_reason(config: ModelConfig) -> str | None:
    """Why no precision has attention for this shape."""
    num_kv_heads, size, _ = config.cached
    if size % HEAD_SIZE_STEP or size > MAX_HEAD_SIZE:
        return (
            f"the head size is {size}; Quill's attention needs a multiple of {HEAD_SIZE_STEP} up "
            f"to {MAX_HEAD_SIZE}. Train the model with such a head size"
        )
    if (group := config.num_heads // num_kv_heads) > MAX_GROUP:
        return (
            f"{group} heads share their keys and values; Quill's attention takes {MAX_GROUP} at "
            "the most. Train the model with more K/V heads"
        )
    if config.recurrence is not None and config.d_model % (2 * HEAD_SIZE_STEP):
        return (
            f"d_model is {config.d_model}; a recurrent encoder has half of it in each direction, "
            f"and Quill's operators need a multiple of {2 * HEAD_SIZE_STEP}"
        )
    widths: dict[str, int] = {}
    if config.experts is not None:
        widths = {"d_model": config.d_model, "d_expert": config.experts.d_expert}
    if config.latent is not None:
        widths |= {"rank": config.latent.rank, "value_size": config.latent.value_size}
    for name, width in widths.items():
        if width % COLUMNS:
            return (
                f"{name} is {width}; Quill's operators for experts and latent attention need "
                f"multiples of {COLUMNS}. Train the model with such sizes"
            )
    if config.context < MIN_CONTEXT:
        return f"the context is {config.context} tokens; at least {MIN_CONTEXT} are needed"
    return None


def _block_reason(config: ModelConfig) -> str | None:
    """Why the matrices can't be quantized: their inputs aren't whole blocks of 32."""
    widths = {
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "num_heads x head_size": config.num_heads * config.head_size,
    }
    if config.experts is not None:
        widths["d_expert"] = config.experts.d_expert
    if config.latent is not None:
        widths["num_heads x value_size"] = config.num_heads * config.latent.value_size
        widths["query_rank"] = config.latent.query_rank
    for name, width in widths.items():
        if width % BLOCK_SIZE:
            return (
                f"{name} is {width}; quantized weights need multiples of {BLOCK_SIZE}. Export with "
                "--precision fp32"
            )
    return None


def _cuda_reason(config: ModelConfig, precision: Precision) -> str | None:
    """Why ONNX Runtime's CUDA operators can't compute the model."""
    if config.family == "encoder":
        return f"an encoder has no {precision} graphs: its attention is a CPU operator of Quill's"
    if config.family == "seq2seq":
        return (
            f"a translator has no {precision} graphs: the runtime's PagedAttention on CUDA writes "
            "into the blocks that it reads, so it can't compute cross-attention"
        )
    custom = {
        "experts": config.experts,
        "latent attention": config.latent,
        "short convolutions": config.short_conv,
    }
    if found := [name for name, part in custom.items() if part is not None]:
        return (
            f"a model with {' and '.join(found)} has no {precision} graphs: only Quill's custom "
            "operators compute that, and they are for the CPU"
        )
    if config.partial_rotary_size:
        return (
            f"a model with partial rotary positions has no {precision} graphs: the runtime's "
            "PagedAttention turns the first numbers of a head, Quill the last"
        )
    if config.attention_sinks:
        return (
            f"a model with attention sinks has no {precision} graphs: how the runtime's "
            "PagedAttention takes them couldn't be tried without a GPU"
        )
    if config.window:
        return (
            f"a model with a window has no {precision} graphs: how the runtime's PagedAttention "
            "counts a window couldn't be tried without a GPU"
        )
    return None
