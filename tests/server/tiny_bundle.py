"""A small network with a bundle made of it: what the tests of the engine run on."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from export.bundle import Wishes, write_bundle
from export.manifest import Manifest
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.transformer import Transformer
from server.loading import Bundle
from server.session import OrtSession, SessionSettings, open_decoder
from server.slots import Slots, SlotShape
from server.tiles import padded

CONTEXT = 128

# The network is tiny; threads that wait for each other only make it slower.
torch.set_num_threads(1)


@dataclass(frozen=True)
class TinyBundle:
    directory: Path
    manifest: Manifest
    model: Transformer

    def session(self, precision: str, num_slots: int) -> OrtSession:
        graphs = self.manifest.graphs_in(precision)
        decoder = open_decoder(
            self.directory / graphs.decoder, SessionSettings(num_threads=1, spinning=False)
        )
        shape = SlotShape.of(self.manifest.sizes, CONTEXT, graphs.cache_type)
        pad = Bundle(self.directory, self.manifest, graphs).needs_padding
        slots = Slots(padded(num_slots), shape)
        return OrtSession(decoder, slots, self.manifest.sizes.vocab_size, pad)


def make_tiny_bundle(directory: Path) -> TinyBundle:
    """Untrained, but with weights large enough that its distributions have peaks."""
    config = ModelConfig(
        family="causal",
        vocab_size=512,
        context=CONTEXT,
        d_model=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        d_ff=128,
        positions="rotary",
        norm="rms",
        activation="swiglu",
    )
    torch.manual_seed(0)
    weights = Transformer(config).state_dict()
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = weight * (20 if name == "embedding.weight" else 10)
    checkpoint = Checkpoint(config, weights)
    wishes = Wishes(precisions=("fp32", "int4"), quantiser="rtn", verify=False)
    manifest = write_bundle(directory, checkpoint, wishes, lambda _: nullcontext())
    return TinyBundle(directory, manifest, checkpoint.build())
