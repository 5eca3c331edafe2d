"""Makes the network ready to be traced in one precision.

Knows: which modules hold weights, how to swap them for packed ones.
Does not know: which integers stand for a weight (export/quantize/quantization.py), files.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from quill.export.errors import UnsupportedModelError
from quill.export.graph.attention import HEAD_SIZE_STEP, MAX_GROUP, MAX_HEAD_SIZE
from quill.export.graph.graphs import (
    Graph,
    Project,
    decoder_graph,
    encoder_graph,
    text_encoder_graph,
)
from quill.export.graph.quill_layers import FusedLayer, OwnEmbedding, OwnLinear, can_fuse
from quill.export.graph.recurrent import loop_products
from quill.export.graph.stacked_layers import stack_operators
from quill.export.precisions import Device, Precision, family_problem
from quill.export.quantize.quantization import Quantization, in_halves, quantize
from quill.export.quantize.quill_layout import COLUMNS
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.network.config import ModelConfig
from quill.model.network.layers import EncoderLayer, SoftCap
from quill.model.network.network import Network
from quill.model.network.recurrent import Recurrent
from quill.model.network.transformer import Transformer

MIN_CONTEXT = 16  # enough to verify a few steps after a prompt


@dataclass(frozen=True)
class Prepared:
    """A network whose forward pass, when traced, is the graph."""

    model: Network
    project: Project
    cache_type: torch.dtype
    quantization: Quantization | None = None
    norm: nn.Module = field(default_factory=nn.Identity)  # of hidden states, if the projection's

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


def check_exportable(config: ModelConfig) -> None:
    """Refuses shapes that the attention operators can't compute."""
    num_kv_heads, size, _ = config.cached
    if size % HEAD_SIZE_STEP or size > MAX_HEAD_SIZE:
        raise UnsupportedModelError(
            f"the head size is {size}; Quill's attention needs a multiple of {HEAD_SIZE_STEP} up "
            f"to {MAX_HEAD_SIZE}. Train the model with such a head size"
        )
    if (group := config.num_heads // num_kv_heads) > MAX_GROUP:
        raise UnsupportedModelError(
            f"{group} heads share their keys and values; Quill's attention takes {MAX_GROUP} at "
            "the most. Train the model with more K/V heads"
        )
    if config.recurrence is not None and config.d_model % (2 * HEAD_SIZE_STEP):
        raise UnsupportedModelError(
            f"d_model is {config.d_model}; a recurrent encoder has half of it in each direction, "
            f"and Quill's operators need a multiple of {2 * HEAD_SIZE_STEP}"
        )
    for name, width in _stacked_widths(config).items():
        if width % COLUMNS:
            raise UnsupportedModelError(
                f"{name} is {width}; Quill's operators for experts and latent attention need "
                f"multiples of {COLUMNS}. Train the model with such sizes"
            )
    if config.context < MIN_CONTEXT:
        raise UnsupportedModelError(
            f"the context is {config.context} tokens; at least {MIN_CONTEXT} are needed"
        )


def _stacked_widths(config: ModelConfig) -> dict[str, int]:
    """What must be whole groups of columns."""
    widths = {}
    if config.experts is not None:
        widths = {"d_model": config.d_model, "d_expert": config.experts.d_expert}
    if config.latent is not None:
        widths |= {"rank": config.latent.rank, "value_size": config.latent.value_size}
    return widths


class Networks:
    """A checkpoint's network, made ready in any precision. Its tensors are never changed."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def prepare(self, precision: Precision) -> Prepared:
        if problem := family_problem(precision, self._checkpoint.config.family):
            raise UnsupportedModelError(problem)
        match precision:
            case "fp32":
                return self._plain(torch.float32)
            case "fp16":
                return self._plain(torch.float16)
            case "quill4":
                return self._own(in_halves(quantize(self._checkpoint, 4)))
            case "quill8":
                return self._own(quantize(self._checkpoint, 8))

    def _plain(self, dtype: torch.dtype) -> Prepared:
        model = self._checkpoint.build().to(dtype)
        if isinstance(model, Recurrent):
            loop_products(model)
        elif isinstance(model, Transformer):
            stack_operators(model)
        return Prepared(model, model.project, dtype)

    def _own(self, quantization: Quantization) -> Prepared:
        """With integers for weights, and Quill's own operators."""
        model, cache_type = self._checkpoint.build(), torch.float16
        norm: nn.Module = nn.Identity()
        if isinstance(model, Recurrent):
            loop_products(model)
            cache_type = torch.float32  # what is rounded in a state would be rounded again
        elif isinstance(model, Transformer) and can_fuse(model.config):
            norm = model.decoder_norm
        project = use_operators(model, quantization)
        if model.config.logit_soft_cap:
            project = nn.Sequential(project, SoftCap(model.config.logit_soft_cap))
        return Prepared(model, project, cache_type, quantization, norm)


def use_operators(model: Network, quantization: Quantization) -> nn.Module:
    """Swaps every matrix for one of our own, in place, and fuses what surrounds them if it fits.
    Answers the vocabulary projection."""
    weights, fuses = quantization.weights, can_fuse(model.config)
    name = "embedding.weight" if model.projection is None else "projection.weight"
    project = OwnLinear(weights[name], model.output_bias)
    embedding = OwnEmbedding(weights["embedding.weight"])
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
                setattr(parent, child_name, OwnLinear(weight, child.bias, gated=gated))
    if fuses:
        assert isinstance(model, Transformer)
        for index, layer in enumerate(model.decoder):
            assert isinstance(layer, EncoderLayer)
            model.decoder[index] = FusedLayer(layer)
        project.take_norm(model.decoder_norm)
        model.decoder_norm = nn.Identity()
    return nn.Sequential(model.head, project) if isinstance(model, Transformer) else project
