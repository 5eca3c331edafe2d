"""Prepares the network for tracing in one precision.

Knows: which modules hold weights, how to replace them with quantized ones.
Does not know: how weights are quantized (export/quantize/quantization.py), files.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from quill.export.graph.graphs import (
    Graph,
    Project,
    decoder_graph,
    encoder_graph,
    text_encoder_graph,
)
from quill.export.graph.quill_layers import CustomEmbedding, CustomLinear, FusedLayer, can_fuse
from quill.export.graph.recurrent import loop_products
from quill.export.graph.stacked_layers import stack_operators
from quill.export.precisions import Device, Precision
from quill.export.quantize.quantization import Quantization, in_halves, quantize
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.network.layers import EncoderLayer, SoftCap
from quill.model.network.network import Network
from quill.model.network.recurrent import Recurrent
from quill.model.network.transformer import Transformer


@dataclass(frozen=True)
class Prepared:
    """A network whose traced forward pass is the graph."""

    model: Network
    project: Project
    cache_type: torch.dtype
    quantization: Quantization | None = None
    norm: nn.Module = field(
        default_factory=nn.Identity
    )  # of hidden states, if the projection computes it

    def decoder(self, device: Device) -> Graph | None:
        if self.model.config.family == "encoder":
            return None
        return decoder_graph(self.model, self.project, self.cache_type, device, self.norm)

    def encoder(self) -> Graph | None:
        match self.model.config.family:
            case "causal":
                return None
            case "seq2seq":
                return encoder_graph(self.model, self.cache_type)
            case "encoder":
                return text_encoder_graph(self.model, self.project)


class Networks:
    """Prepares a checkpoint's network in any precision. The checkpoint's tensors don't change."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def prepare(self, precision: Precision) -> Prepared:
        match precision:
            case "fp32":
                return self._plain(torch.float32)
            case "fp16":
                return self._plain(torch.float16)
            case "quill4":
                return self._quantized(in_halves(quantize(self._checkpoint, 4)))
            case "quill8":
                return self._quantized(quantize(self._checkpoint, 8))

    def _plain(self, dtype: torch.dtype) -> Prepared:
        model = self._checkpoint.build().to(dtype)
        if isinstance(model, Recurrent):
            loop_products(model)
        elif isinstance(model, Transformer):
            stack_operators(model)
        return Prepared(model, model.project, dtype)

    def _quantized(self, quantization: Quantization) -> Prepared:
        """With quantized weights and custom operators."""
        model, cache_type = self._checkpoint.build(), torch.float16
        norm: nn.Module = nn.Identity()
        if isinstance(model, Recurrent):
            loop_products(model)
            cache_type = torch.float32  # a rounded state would be rounded again at every step
        elif isinstance(model, Transformer) and can_fuse(model.config):
            norm = model.decoder_norm
        project = use_operators(model, quantization)
        if model.config.logit_soft_cap:
            project = nn.Sequential(project, SoftCap(model.config.logit_soft_cap))
        return Prepared(model, project, cache_type, quantization, norm)


def use_operators(model: Network, quantization: Quantization) -> nn.Module:
    """Replaces every matrix with a custom operator, in place, and fuses norms, gates and sums if
    possible. Returns the vocabulary projection."""
    weights, fuses = quantization.weights, can_fuse(model.config)
    name = "embedding.weight" if model.projection is None else "projection.weight"
    project = CustomLinear(weights[name], model.output_bias)
    embedding = CustomEmbedding(weights["embedding.weight"])
    if model.projection is None:
        embedding.records_CGB = project.records_CGB  # one tensor of the graph, not two
    model.embedding = embedding  # type: ignore[assignment]
    model.projection = None
    stack_operators(model, weights)
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in parent.named_children():
            if isinstance(child, nn.Linear) and child_name != "router":
                weight = weights[f"{parent_name}.{child_name}.weight".removeprefix(".")]
                gated = fuses and parent_name.endswith(".feed_forward") and child_name == "up"
                setattr(parent, child_name, CustomLinear(weight, child.bias, gated=gated))
    if fuses:
        assert isinstance(model, Transformer)
        for index, layer in enumerate(model.decoder):
            assert isinstance(layer, EncoderLayer)
            model.decoder[index] = FusedLayer(layer)
        project.take_norm(model.decoder_norm)
        model.decoder_norm = nn.Identity()
    return nn.Sequential(model.head, project) if isinstance(model, Transformer) else project
