"""Makes the network ready to be traced in one precision.

Knows: which modules hold weights, how to swap them for packed ones.
Does not know: which integers stand for a weight (export/quantise/quantisation.py), files.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quill.export.errors import UnsupportedModelError
from quill.export.graph.attention import OWN_HEAD_SIZES
from quill.export.graph.graphs import Graph, Project, decoder_graph, encoder_graph
from quill.export.graph.nbits_layers import PackedEmbedding, PackedLinear
from quill.export.graph.quill_layers import FusedLayer, OwnEmbedding, OwnLinear, can_fuse
from quill.export.precisions import Precision
from quill.export.quantise.outliers import find_outliers
from quill.export.quantise.quantisation import Quantisation, in_halves, quantise
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.network.config import ModelConfig
from quill.model.network.layers import EncoderLayer
from quill.model.network.transformer import Transformer

MIN_CONTEXT = 16  # enough to verify a few steps after a prompt


@dataclass(frozen=True)
class Prepared:
    """A network whose forward pass, when traced, is the graph."""

    model: Transformer
    project: Project
    cache_dtype: torch.dtype
    quantisation: Quantisation | None = None
    own_attention: bool = False

    def decoder(self) -> Graph:
        return decoder_graph(self.model, self.project, self.cache_dtype, self.own_attention)

    def encoder(self) -> Graph | None:
        return encoder_graph(self.model) if self.model.config.family == "seq2seq" else None


def check_exportable(config: ModelConfig) -> None:
    """Refuses shapes that the attention operator can't compute."""
    divisor = 16 if config.positions == "rotary" else 8
    if config.head_size % divisor:
        raise UnsupportedModelError(
            f"the head size is {config.head_size}; the runtime's attention operator needs a "
            f"multiple of {divisor} with {config.positions} positions. Train the model with such "
            "a head size"
        )
    if config.context < MIN_CONTEXT:
        raise UnsupportedModelError(
            f"the context is {config.context} tokens; at least {MIN_CONTEXT} are needed"
        )


class Networks:
    """A checkpoint's network, made ready in any precision. Its tensors are never changed."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def prepare(self, precision: Precision) -> Prepared:
        match precision:
            case "fp32":
                return self._plain(torch.float32)
            case "fp16":
                return self._plain(torch.float16)
            case "int4":
                return self._packed()
            case "quill4":
                return self._own(in_halves(self._four_bits))
            case "quill8":
                return self._own(quantise(self._checkpoint, 8))

    @functools.cached_property
    def _four_bits(self) -> Quantisation:
        return quantise(self._checkpoint, 4)

    def _plain(self, dtype: torch.dtype) -> Prepared:
        model = self._checkpoint.build().to(dtype)
        return Prepared(model, model.project, dtype)

    def _packed(self) -> Prepared:
        """With integers for weights, and the runtime's operators."""
        model = self._checkpoint.build()
        project = pack(model, self._four_bits, find_outliers(self._checkpoint))
        return Prepared(model, project, torch.float32, self._four_bits)

    def _own(self, quantisation: Quantisation) -> Prepared:
        """With integers for weights, and Quill's own operators."""
        model = self._checkpoint.build()
        project = use_operators(model, quantisation)
        if model.config.family == "seq2seq" or model.config.head_size not in OWN_HEAD_SIZES:
            return Prepared(model, project, torch.float32, quantisation)
        return Prepared(model, project, torch.float16, quantisation, own_attention=True)


def use_operators(model: Transformer, quantisation: Quantisation) -> Project:
    """Swaps every matrix for one of our own, in place, and fuses what surrounds them if it fits.
    Answers the vocabulary projection."""
    weights, fuses = quantisation.weights, can_fuse(model.config)
    name = "embedding.weight" if model.projection is None else "projection.weight"
    project = OwnLinear(weights[name], model.output_bias)
    embedding = OwnEmbedding(weights["embedding.weight"])
    if model.projection is None:
        embedding.records_CGB = project.records_CGB  # one tensor of the graph, not two
    model.embedding = embedding  # type: ignore[assignment]
    model.projection = None
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                weight = weights[f"{parent_name}.{child_name}.weight"]
                gated = fuses and child_name == "up"
                setattr(parent, child_name, OwnLinear(weight, child.bias, gated=gated))
    if fuses:
        for index, layer in enumerate(model.decoder):
            assert isinstance(layer, EncoderLayer)
            model.decoder[index] = FusedLayer(layer)
        project.take_norm(model.decoder_norm)
        model.decoder_norm = nn.Identity()
    return project


def pack(model: Transformer, quantisation: Quantisation, outliers: Mapping[str, Tensor]) -> Project:
    """Swaps every matrix for a packed one, in place. Answers the vocabulary projection.

    `outliers`: the inputs of a matrix that are kept out of the rounding.
    """
    weights = quantisation.weights
    projection = "embedding.weight" if model.projection is None else "projection.weight"
    model.projection = None
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                name = f"{parent_name}.{child_name}.weight"
                packed = PackedLinear(weights[name], child.bias, outliers.get(name))
                setattr(parent, child_name, packed)
    model.embedding = PackedEmbedding(weights["embedding.weight"])  # type: ignore[assignment]
    return PackedLinear(weights[projection], model.output_bias, outliers.get(projection))
