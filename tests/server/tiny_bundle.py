"""Tiny networks, exported: the bundles that tests of the server load."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quill.export.bundle.manifest import Manifest
from quill.export.pipeline import ExportOptions, write_bundle
from quill.export.precisions import Precision
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.data.tokenizer import ENCODER_SPECIAL_TOKENS, SpecialTokens, byte_tokenizer
from quill.model.network.config import CellKind, ContextKind, ModelConfig, Recurrence, ShortConv
from quill.model.network.network import Network
from quill.model.network.networks import make_network
from quill.server.engine.kv_cache import BlockShape, KVCache
from quill.server.engine.model_runner import OrtSession
from quill.server.machine.onnx_session import open_graph
from tests import tiny_networks as tiny
from tests.operators import SERVED

CONTEXT = 128
NUM_BLOCKS = 256
EOS = 10  # of the translator: a newline

# The exporter's networks with the server's vocabulary and context.
_SIZES: dict[str, Any] = {"vocab_size": 512, "context": CONTEXT, "d_ff": 128}
CAUSAL = replace(tiny.LLAMA, **_SIZES)
SEQ2SEQ = replace(tiny.SEQ2SEQ, num_encoder_layers=2, **_SIZES)
ENCODER = replace(tiny.ENCODER, norm_eps=1e-12, **_SIZES)
RECURRENT = ModelConfig(
    family="seq2seq",
    vocab_size=512,
    context=CONTEXT,
    d_model=64,
    num_layers=2,
    num_encoder_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_size=64,
    d_ff=64,
    positions="none",
    norm="layer",
    activation="relu",
    scale_embeddings=True,
    recurrence=Recurrence(cell="gru", context="bahdanau"),
)
TRANSLATOR: dict[str, Any] = {
    "tokenizer": byte_tokenizer(),
    "special_tokens": SpecialTokens(bos=0, eos=EOS),
}
# What the matrices are multiplied by, and the embedding.
SCALES = {"causal": (10.0, 20.0), "seq2seq": (4.0, 4.0), "encoder": (4.0, 4.0)}
# A state that grows from token to token would make much of every rounding.
RECURRENT_SCALES = (1.0, 3.0)


# The network is tiny; threads that wait for each other only make it slower.
torch.set_num_threads(1)


@dataclass(frozen=True)
class TinyBundle:
    directory: Path
    manifest: Manifest
    model: Network

    def session(self, precision: str, num_blocks: int = NUM_BLOCKS) -> OrtSession:
        graphs, sizes = self.manifest.graphs_in(precision), self.manifest.sizes
        assert graphs.decoder is not None
        decoder = open_graph(self.directory / graphs.decoder, "cpu", 1, spinning=False)
        blocks = KVCache(num_blocks, BlockShape.of(sizes, graphs))
        encoder = None
        if graphs.encoder is not None:
            encoder = open_graph(self.directory / graphs.encoder, "cpu", 1, spinning=False)
        return OrtSession(decoder, blocks, sizes, encoder, gives_hidden=graphs.hidden)


def rounding_error(model: Network, num_sources: int = 24) -> float:
    """How far float32 is from float64 in a translator's logits, by PyTorch on both sides.

    Two programs that compute in float32, each in its own order, may differ by as much. How much
    that is depends on the processor's kernels and on the network: 5e-4 on AVX2, with weights
    that are four times what they were drawn as and logits that have a spread of 4.
    """
    exact = copy.deepcopy(model).double()
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for length in range(1, num_sources + 1):
        source_1S = torch.randint(model.config.vocab_size, (1, 2 * length), generator=generator)
        mask_1S = torch.ones_like(source_1S, dtype=torch.bool)
        bos_11 = torch.zeros((1, 1), dtype=torch.long)
        with torch.no_grad():
            rounded, truth = (
                each(bos_11, each.encode(source_1S, mask_1S)) for each in (model, exact)
            )
        worst = max(worst, float((rounded - truth).abs().max()))
    return worst


def make_tiny_bundle(directory: Path, precisions: tuple[Precision, ...] = SERVED) -> TinyBundle:
    return _make_bundle(directory, CAUSAL, precisions)


def make_tiny_hybrid(directory: Path) -> TinyBundle:
    """Short convolutions in two of three layers, sinks in the other."""
    conv = ShortConv(taps=3, layers=(0, 2))
    config = replace(CAUSAL, num_layers=3, short_conv=conv, attention_sinks=True)
    return _make_bundle(directory, config, SERVED)


def make_tiny_translator(directory: Path) -> TinyBundle:
    return _make_bundle(directory, SEQ2SEQ, SERVED, **TRANSLATOR, stop_ids=(EOS,))


def make_tiny_encoder(directory: Path) -> TinyBundle:
    """BERT's shape, with [CLS] before a text and [SEP] after it."""
    tokenizer = byte_tokenizer(ENCODER_SPECIAL_TOKENS)
    rest = {"tokenizer": tokenizer, "special_tokens": tokenizer.special}
    return _make_bundle(directory, ENCODER, SERVED, **rest, prepend_bos=True, append_eos=True)


def make_tiny_recurrent(
    directory: Path, cell: CellKind, context: ContextKind, precisions: tuple[Precision, ...]
) -> TinyBundle:
    config = replace(RECURRENT, recurrence=Recurrence(cell=cell, context=context))
    return _make_bundle(directory, config, precisions, **TRANSLATOR)


def make_talker(directory: Path, context: int = CONTEXT) -> TinyBundle:
    """With a tokenizer and a chat template: it takes every kind of prompt."""
    template = "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}"
    rest = {"special_tokens": SpecialTokens(bos=0, eos=0), "stop_ids": (0,)}
    config = replace(CAUSAL, context=context)
    return _make_bundle(
        directory, config, ("fp32",), tokenizer=byte_tokenizer(), chat_template=template, **rest
    )


def _make_bundle(
    directory: Path, config: ModelConfig, precisions: tuple[Precision, ...], **rest: Any
) -> TinyBundle:
    """Untrained, but with weights large enough that its distributions have peaks."""
    torch.manual_seed(0)
    weights = make_network(config).state_dict()
    scales = SCALES[config.family] if config.recurrence is None else RECURRENT_SCALES
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = weight * scales[name == "embedding.weight"]
    checkpoint = Checkpoint(config, weights, **rest)
    wishes = ExportOptions(precisions=precisions, verify=False)
    manifest = write_bundle(directory, checkpoint, wishes)
    return TinyBundle(directory, manifest, checkpoint.build())
