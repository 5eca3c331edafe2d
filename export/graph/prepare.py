"""Prepares the network for tracing in one precision.

Knows: which modules hold weights, how to replace them with quantized ones.
Does not know: how weights are quantized (export/quantize/quantization.py), files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from quill.export.graph.graphs import (
    Graph,
    Project,
    decoder_graph,
    encoder_graph,
    text_encoder_graph,
)
from quill.export.graph.quill_layers import CustomEmbedding, CustomLinear, FusedLayer, can_fuse
from quill.export.graph.recurrent import loop_products
from quill.export.graph.stacked_layers import stack_operators, stacked_tensors
from quill.export.graph.stand_ins import StandIns, is_large
from quill.export.precisions import PRECISIONS, Device, Precision
from quill.export.quantize.matrices import QuantizedMatrices, Recipe
from quill.export.quantize.quantization import Quantization, is_quantized
from quill.export.quantize.quill_layout import OperatorWeight
from quill.model.checkpoint.checkpoint import Checkpoint, check_weights
from quill.model.checkpoint.tensors import LazyTensor, lazy
from quill.model.network.layers import EncoderLayer, SoftCap
from quill.model.network.network import Network
from quill.model.network.networks import make_network
from quill.model.network.recurrent import Recurrent
from quill.model.network.transformer import Transformer

Tick = Callable[[], None]  # one more item is done


@dataclass(frozen=True)
class Prepared:
    """A network whose traced forward pass is the graph."""

    model: Network
    project: Project
    cache_type: torch.dtype
    stand_ins: StandIns
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
    """Prepares a checkpoint's network in any precision, one tensor in memory at a time. The
    checkpoint's tensors don't change."""

    def __init__(self, checkpoint: Checkpoint, parts: Path) -> None:
        self._checkpoint = checkpoint
        self._parts = parts  # a directory for quantized matrices and temporary files

    def num_matrices(self, precision: Precision) -> int | None:
        """How many are quantized; None: none."""
        if not PRECISIONS[precision].is_quantized:
            return None
        weights = lazy(self._checkpoint.weights)
        return sum(is_quantized(name, len(weights.shape(name))) for name in weights)

    def prepare(
        self, precision: Precision, tick: Tick = lambda: None, recipe: Recipe | None = None
    ) -> Prepared:
        """A tick for each matrix that is quantized. `recipe`: how, for quill4."""
        match precision:
            case "fp32":
                return self._plain(torch.float32)
            case "fp16":
                return self._plain(torch.float16)
            case "quill4":
                return self._quantized(4, tick, recipe)
            case "quill8":
                return self._quantized(8, tick)

    def standard(self, swap: Callable[[EncoderLayer], None]) -> tuple[Network, StandIns]:
        """The network in float32 without custom operators. `swap` changes a layer whose experts and
        latent attention have their numbers."""
        stand_ins = StandIns(self._parts)
        model = self._model(stand_ins, torch.float32)
        if isinstance(model, Transformer):
            for name, layer in _layers(model):
                self._load(name, layer, stacked_tensors(layer, floats=True))
                swap(layer)
                stand_ins.replace(layer)
        return model, stand_ins

    def _plain(self, dtype: torch.dtype) -> Prepared:
        stand_ins = StandIns(self._parts)
        model = self._model(stand_ins, dtype)
        if isinstance(model, Transformer):
            for name, layer in _layers(model):
                self._load(name, layer, stacked_tensors(layer, floats=True))
                stack_operators(name, layer)
                stand_ins.replace(layer)
        return Prepared(model, model.project, dtype, stand_ins)

    def _quantized(self, bits: Literal[4, 8], tick: Tick, recipe: Recipe | None = None) -> Prepared:
        """With quantized weights and custom operators."""
        stand_ins = StandIns(self._parts)
        weights = QuantizedMatrices(self._checkpoint, bits, self._parts, tick, recipe)
        model, cache_type = self._model(stand_ins, torch.float32), torch.float16
        norm: nn.Module = nn.Identity()
        if isinstance(model, Recurrent):
            cache_type = torch.float32  # a rounded state would be rounded again at every step
        elif isinstance(model, Transformer):
            for name, layer in _layers(model):
                self._load(name, layer, stacked_tensors(layer, floats=False))
                stack_operators(name, layer, weights)
                stand_ins.replace(layer)
            if can_fuse(model.config):
                norm = model.decoder_norm
        project = use_operators(model, weights, stand_ins)
        if model.config.logit_soft_cap:
            project = nn.Sequential(project, SoftCap(model.config.logit_soft_cap))
        return Prepared(model, project, cache_type, stand_ins, weights.quantization(), norm)

    def _model(self, stand_ins: StandIns, dtype: torch.dtype) -> Network:
        """The network with stand-ins for its matrices. A recurrent network is whole: its loops
        compute with transposed matrices."""
        if self._checkpoint.config.recurrence is not None:
            whole = self._checkpoint.build().to(dtype)
            assert isinstance(whole, Recurrent)
            loop_products(whole)
            return whole
        with torch.device("meta"):
            model = make_network(self._checkpoint.config).requires_grad_(False)
        weights = lazy(self._checkpoint.weights)
        check_weights(model, weights)
        state: dict[str, Tensor] = {}
        for name in weights:
            shape, read = weights.shape(name), partial(_converted, weights, name, dtype)
            large = is_large(shape, dtype)
            state[name] = stand_ins.of(LazyTensor(shape, dtype, read)) if large else read()
        model.load_state_dict(state, assign=True)
        model.compute_tables()
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
        return model.eval()

    def _load(self, name: str, layer: EncoderLayer, tensors: Sequence[str]) -> None:
        """Puts numbers in the place of stand-ins."""
        weights = {each: self._checkpoint.weights[f"{name}.{each}"].float() for each in tensors}
        layer.load_state_dict(weights, assign=True, strict=False)


def _converted(weights: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    return weights[name].to(dtype)


def _layers(model: Transformer) -> list[tuple[str, EncoderLayer]]:
    modules = model.named_modules()
    return [(name, layer) for name, layer in modules if isinstance(layer, EncoderLayer)]


def use_operators(
    model: Network, weights: Mapping[str, OperatorWeight], stand_ins: StandIns
) -> nn.Module:
    """Replaces every matrix with a custom operator, in place, and fuses norms, gates and sums if
    possible. Returns the vocabulary projection."""
    fuses = can_fuse(model.config)
    project = _use_vocabulary(model, weights, stand_ins)
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in parent.named_children():
            name = f"{parent_name}.{child_name}.weight".removeprefix(".")
            if isinstance(child, nn.Linear) and is_quantized(name, 2):
                weight = weights[name]
                gated = fuses and parent_name.endswith(".feed_forward") and child_name == "up"
                custom = CustomLinear(weight, child.bias, gated=gated)
                stand_ins.replace(custom)
                setattr(parent, child_name, custom)
    if fuses:
        assert isinstance(model, Transformer)
        for index, layer in enumerate(model.decoder):
            assert isinstance(layer, EncoderLayer)
            model.decoder[index] = FusedLayer(layer)
        project.take_norm(model.decoder_norm)
        model.decoder_norm = nn.Identity()
    if model.config.num_classes:
        assert isinstance(model, Transformer)
        return model.head
    return nn.Sequential(model.head, project) if isinstance(model, Transformer) else project


def _use_vocabulary(
    model: Network, weights: Mapping[str, OperatorWeight], stand_ins: StandIns
) -> CustomLinear:
    """The vocabulary projection and the embedding."""
    name = "embedding.weight" if model.projection is None else "projection.weight"
    project = CustomLinear(weights[name], model.output_bias)
    stand_ins.replace(project)
    embedding = CustomEmbedding(weights["embedding.weight"])
    if model.projection is None:
        embedding.tie(project)
    stand_ins.replace(embedding)
    model.embedding = embedding  # type: ignore[assignment]
    model.projection = None
    return project
