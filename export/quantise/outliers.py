"""Finds the few inputs of a matrix that are far larger than the rest.

Knows: the network's activations. Does not know: integers, graphs.

The runtime's fast kernel rounds activations to 8 bits, with one scale for 32 neighbours. In a
trained network a handful of channels carry most of the energy (one of SmolLM2's 576 is twenty
times the others), and their neighbours drown in the rounding. Kept out of the kernel and
multiplied in float32, a few of them cut SmolLM2's divergence from PyTorch to a third.

They live in the residual stream, so only the layers that read it are looked at. Which ones they
are hardly depends on the text, so random tokens find them.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.network.transformer import Transformer

# I inputs · T tokens

MAX_OUTLIERS = 8
MIN_LOUDNESS = 2.5  # times the root mean square of all channels
READ_THE_STREAM = ("qkv", "up", "query", "key_value")
NUM_TOKENS = 128


@torch.no_grad()
def find_outliers(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """For each matrix that has some: which of its inputs they are."""
    model = checkpoint.build()
    energies: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(READ_THE_STREAM):
            module.register_forward_pre_hook(_measure(f"{name}.weight", energies))
    hidden_TD = _hidden(model).flatten(0, 1)
    tied = model.projection is None
    energies["embedding.weight" if tied else "projection.weight"] = hidden_TD.square().sum(dim=0)
    found = {name: _loudest(energy_I) for name, energy_I in energies.items()}
    return {name: channels for name, channels in found.items() if len(channels)}


def _measure(
    name: str, energies: dict[str, Tensor]
) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def measure(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        energies[name] = inputs[0].flatten(0, -2).square().sum(dim=0)

    return measure


def _hidden(model: Transformer) -> Tensor:
    """Runs random tokens through the network."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, min(NUM_TOKENS, model.config.context))
    ids_1T = torch.randint(model.config.vocab_size, shape, generator=generator)
    cross = None
    if model.config.family == "seq2seq":
        cross = model.encode(ids_1T, torch.ones_like(ids_1T, dtype=torch.bool))
    return model.hidden(ids_1T, model.uncached(cross))


def _loudest(energy_I: Tensor) -> Tensor:
    top = energy_I.topk(min(MAX_OUTLIERS, len(energy_I)))
    return top.indices[top.values > MIN_LOUDNESS**2 * energy_I.mean()].sort().values
