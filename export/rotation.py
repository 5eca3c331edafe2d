"""Turns the residual stream, so that no channel is far louder than the others.

Knows: which matrices write the stream and which read it. Does not know: integers, graphs.

In a trained network a handful of channels carry most of the energy (one of SmolLM2's 576 is twenty
times the others). With one scale for a whole row of inputs the quiet ones would drown in the
rounding. But which directions the channels are is nobody's business: turn what is written into
the stream by a random rotation, and everything that reads it by the same, and the network computes
what it did, while every channel becomes a mixture of all (QuaRot, 2024). An RMS norm doesn't mind,
once its gains have moved into the matrix that reads it. A layer norm would.
"""

import torch
from torch import Tensor, nn

from model.layers import EncoderLayer
from model.transformer import Transformer

# D model size · N outputs · V vocabulary

SEED = 0


def can_turn(model: Transformer) -> bool:
    config = model.config
    return (
        config.family == "causal"
        and config.norm == "rms"
        and config.norm_placement == "pre"
        and config.positions == "rotary"
        and not config.scale_embeddings
    )


@torch.no_grad()
def turn(model: Transformer) -> Tensor:
    """Changes the network in place; answers the vocabulary projection's weights."""
    rotation_DD = _rotation(model.config.d_model)
    projection = model.embedding if model.projection is None else model.projection
    projection_VD = _read(projection.weight, model.decoder_norm, rotation_DD)
    model.embedding.weight.copy_(model.embedding.weight @ rotation_DD)
    for layer in model.decoder:
        assert isinstance(layer, EncoderLayer)
        for residual, reads, writes in (
            (layer.attention_residual, layer.attention.qkv, layer.attention.out),
            (layer.feed_forward_residual, layer.feed_forward.up, layer.feed_forward.down),
        ):
            reads.weight.copy_(_read(reads.weight, residual.norm, rotation_DD))
            _turn_written(writes, rotation_DD)
    for norm in model.modules():
        if isinstance(norm, nn.RMSNorm):
            norm.weight.fill_(1.0)
    return projection_VD


def _read(weight_ND: Tensor, norm: nn.Module, rotation_DD: Tensor) -> Tensor:
    gain_D = norm.weight
    assert isinstance(gain_D, Tensor)
    return (weight_ND * gain_D) @ rotation_DD


def _turn_written(linear: nn.Linear, rotation_DD: Tensor) -> None:
    linear.weight.copy_(rotation_DD.T @ linear.weight)
    if linear.bias is not None:
        linear.bias.copy_(linear.bias @ rotation_DD)


def _rotation(size: int) -> Tensor:
    """A random one: the Q of a matrix of normal numbers."""
    generator = torch.Generator().manual_seed(SEED)
    numbers_DD = torch.randn(size, size, generator=generator, dtype=torch.float64)
    rotation_DD: Tensor = torch.linalg.qr(numbers_DD).Q
    return rotation_DD.to(torch.float32)
