"""Turns a PyTorch module into an ONNX graph, quietly.

Knows: torch.onnx.export and its noise. Does not know: the network, files.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator

import onnx_ir as ir
import torch

from quill.export.graph.graphs import Graph

OPSET = 23  # the first with RMSNormalization as one node

# Warnings about the exporter's internals.
_NOISE = (
    "# The axis name: .* will not be used",
    "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
)


def trace(graph: Graph) -> ir.Model:
    """The module as a graph, with named inputs and outputs and without paths of this machine."""
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            graph.module,
            graph.arguments,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=graph.dynamic_shapes,
            input_names=graph.input_names,
            output_names=graph.output_names,
            verbose=False,
        )
    assert program is not None
    _forget_origin(program.model)
    return program.model


def _forget_origin(model: ir.Model) -> None:
    """Drops stack traces: they name files of this machine and are larger than the graph."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    for value in (*model.graph.initializers.values(), *model.graph.inputs, *model.graph.outputs):
        value.metadata_props.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that torchvision isn't installed
    try:
        with warnings.catch_warnings():
            for message in _NOISE:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        logger.setLevel(level)
