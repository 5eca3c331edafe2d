"""Tiny networks with random weights, and how a test exports one."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import onnx
import torch
from torch import nn

from quill.export.bundle.manifest import Graphs, Manifest
from quill.export.pipeline import ExportOptions, write_bundle
from quill.export.precisions import Precision
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.quantized_weight import QuantizedWeight, pack
from quill.model.data.tokenizer import SpecialTokens, byte_tokenizer
from quill.model.network.config import ModelConfig
from quill.model.network.networks import make_network


def make_checkpoint(config: ModelConfig, seed: int = 0) -> Checkpoint:
    """Random weights, large enough that every part of the network matters to its logits."""
    torch.manual_seed(seed)
    model = make_network(config)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.15)
        if "norm.weight" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Checkpoint(config=config, weights=weights)


def quantized_at_source(checkpoint: Checkpoint) -> Checkpoint:
    """As if it came from a GGUF file: Q4_1 matrices, a Q8_0 embedding, scales in halves."""
    quantized = {
        name: _in_gguf(tensor, name == "embedding.weight")
        for name, tensor in checkpoint.weights.items()
        if tensor.ndim == 2
    }
    values = {name: weight.dequantize() for name, weight in quantized.items()}
    return Checkpoint(
        config=checkpoint.config,
        weights={**checkpoint.weights, **values},
        tokenizer=byte_tokenizer(),
        special_tokens=SpecialTokens(bos=0, eos=0),
        stop_ids=(0,),
        chat_template="{{ messages[0].content }}",
        generation={"temperature": 0.7, "top_k": 40},
        provenance={"name": "tiny-llama", "licence": "MIT"},
        quantized=quantized,
    )


def _in_gguf(weight_NI: torch.Tensor, eight_bits: bool) -> QuantizedWeight:
    blocks_NGB = weight_NI.reshape(weight_NI.shape[0], -1, 32)
    if eight_bits:
        scale_NG = (blocks_NGB.abs().amax(-1) / 127).half().float()
        q = (blocks_NGB / scale_NG.unsqueeze(-1)).round().clamp(-127, 127)
        return pack("q8_0", q.flatten(1) + 128, scale_NG)
    minimum_NG = blocks_NGB.amin(-1).half().float()
    scale_NG = ((blocks_NGB.amax(-1) - minimum_NG) / 15).half().float()
    steps_NGB = (blocks_NGB - minimum_NG.unsqueeze(-1)) / scale_NG.unsqueeze(-1)
    return pack("q4_1", steps_NGB.round().clamp(0, 15).flatten(1), scale_NG, minimum_NG)


class Exported(NamedTuple):
    """A bundle, and the checkpoint that it was made from."""

    directory: Path
    checkpoint: Checkpoint
    manifest: Manifest


def export(
    out: Path, checkpoint: Checkpoint, *precisions: Precision, text: Path | None = None
) -> Exported:
    options = ExportOptions(precisions=precisions, text=text)
    return Exported(out, checkpoint, write_bundle(out, checkpoint, options))


def changed(
    exported: Exported,
    directory: Path,
    change: Callable[[onnx.ModelProto], None],
    role: str = "decoder",
    precision: str = "fp32",
) -> Graphs:
    """The graphs in a copy of the bundle, with something changed about one of them."""
    graphs = exported.manifest.graphs_in(precision)
    shutil.copytree(exported.directory, directory, dirs_exist_ok=True)
    name = graphs.decoder if role == "decoder" else graphs.encoder
    assert name is not None
    model = onnx.load(directory / name)
    change(model)
    onnx.save(model, directory / name)
    return graphs
