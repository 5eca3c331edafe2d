"""Writes a network's graphs and their weights into a bundle's directory.

Knows: the names of a precision's files, the order in which they are written.
Does not know: how graphs are traced, whether they are right (export/verify/), manifests.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
import torch

from quill.export.bundle.manifest import Graphs
from quill.export.graph.cuda_kernels import check_cuda_kernels
from quill.export.graph.graphs import has_hidden_output
from quill.export.graph.prepare import Prepared
from quill.export.graph.trace import trace
from quill.export.graph.weights_file import WeightsFile, weights_file
from quill.export.precisions import PRECISIONS, Precision


def write_graphs(directory: Path, precision: Precision, prepared: Prepared) -> Graphs:
    """Traces the network and writes the graphs and weights, which aren't verified yet."""
    device = PRECISIONS[precision].device
    decoder, encoder = prepared.decoder(device), prepared.encoder()
    quantization = prepared.quantization
    graphs = Graphs(
        precision=precision,
        device=device,
        decoder=None if decoder is None else f"decoder.{precision}.onnx",
        encoder=None if encoder is None else f"encoder.{precision}.onnx",
        weights=f"weights.{precision}.bin",
        cache_type="float16" if prepared.cache_type == torch.float16 else "float32",
        quantization=None if quantization is None else quantization.description,
        verification=None,
        invariance=None,
        hidden=decoder is not None and has_hidden_output(prepared.model.config, device),
        one_token_steps=prepared.model.config.recurrence is not None,
    )
    with weights_file(directory / graphs.weights, prepared.stand_ins) as weights:
        for name, graph in ((graphs.decoder, decoder), (graphs.encoder, encoder)):
            if name is not None and graph is not None:
                _write_model(directory / name, trace(graph), weights, graphs)
    for name in (graphs.decoder, graphs.encoder):
        if name is not None:
            onnx.checker.check_model(directory / name, full_check=True)
    return graphs


@contextlib.contextmanager
def runnable(directory: Path, graphs: Graphs, prepared: Prepared) -> Iterator[Graphs]:
    """The graphs as this machine can run them. Of CUDA graphs: a temporary decoder with the same
    weights and Quill's CPU attention."""
    if graphs.device == "cpu":
        yield graphs
        return
    decoder, name = prepared.decoder("cpu"), "decoder.stand_in.onnx"
    assert decoder is not None, "only decoders are for CUDA"
    stand_in = replace(
        graphs, device="cpu", decoder=name, weights="weights.stand_in.bin", hidden=True
    )
    try:
        with weights_file(directory / stand_in.weights, prepared.stand_ins) as weights:
            _write_model(directory / name, trace(decoder), weights, stand_in)
        yield stand_in
    finally:
        remove_graphs(directory, stand_in)


def _write_model(path: Path, model: ir.Model, weights: WeightsFile, graphs: Graphs) -> None:
    if graphs.device == "cuda":
        check_cuda_kernels(model)
    weights.take(model)
    ir.save(model, path)


def remove_graphs(directory: Path, graphs: Graphs) -> None:
    for name in graphs.file_names:
        (directory / name).unlink(missing_ok=True)
