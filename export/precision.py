"""Makes the network ready to be traced in one precision.

Knows: which modules hold weights, how to swap them for packed ones.
Does not know: which integers stand for a weight (export/quantisation.py), files.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from export.attending import OWN_HEAD_SIZES
from export.errors import UnsupportedModelError
from export.graph import Graph, Project, decoder_graph, encoder_graph
from export.operator_layers import FusedLayer, OwnEmbedding, OwnLinear, can_fuse
from export.packed import PackedEmbedding, PackedLinear
from export.quantisation import Quantisation, check_quantisable
from export.quantisers import eight_bits
from export.rotation import can_turn, turn
from export.rounded import EvenLinear, MixedLinear, RoundedLinear, RoundedProjection
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.layers import EncoderLayer
from model.transformer import Transformer

MIN_CONTEXT = 16  # enough to verify a few steps after a prompt


@dataclass(frozen=True)
class Prepared:
    """A network whose forward pass, when traced, is the graph."""

    model: Transformer
    project: Project
    cache_dtype: torch.dtype
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


def prepare(checkpoint: Checkpoint, dtype: torch.dtype) -> Prepared:
    """The network in full or half precision. The checkpoint's tensors are never changed."""
    model = checkpoint.build().to(dtype)
    return Prepared(model, model.project, dtype)


def prepare_packed(checkpoint: Checkpoint, quantisation: Quantisation) -> Prepared:
    """The network with integers for weights."""
    model = checkpoint.build()
    return Prepared(model, pack(model, quantisation), torch.float32)


def prepare_rounded(checkpoint: Checkpoint) -> Prepared:
    """The network with weights and activations rounded to 8 bits."""
    check_quantisable(checkpoint.config)
    # Its own copy: turning changes weights in place.
    own = {name: weight.clone() for name, weight in checkpoint.weights.items()}
    model = replace(checkpoint, weights=own).build()
    kinds: dict[str, type[RoundedLinear]] = {"down": MixedLinear}
    if can_turn(model):
        kinds |= {"qkv": EvenLinear, "up": EvenLinear}
        project: RoundedLinear = EvenLinear(turn(model))
    else:
        projection = model.embedding if model.projection is None else model.projection
        project = RoundedProjection(projection.weight)
    model.projection = None
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                kind = kinds.get(name, RoundedLinear)
                setattr(parent, name, kind(child.weight, child.bias))
    embedding = PackedEmbedding(eight_bits(model.embedding.weight.detach()))
    model.embedding = embedding  # type: ignore[assignment]
    return Prepared(model, project, torch.float32)


def prepare_own(checkpoint: Checkpoint, quantisation: Quantisation) -> Prepared:
    """The network with integers for weights, computed by Quill's own operators."""
    model = checkpoint.build()
    project = use_operators(model, quantisation)
    if model.config.family == "seq2seq" or model.config.head_size not in OWN_HEAD_SIZES:
        return Prepared(model, project, torch.float32)
    return Prepared(model, project, torch.float16, own_attention=True)


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


def pack(model: Transformer, quantisation: Quantisation) -> Project:
    """Swaps every matrix for a packed one, in place. Answers the vocabulary projection."""
    weights, outliers = quantisation.weights, quantisation.outliers
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
