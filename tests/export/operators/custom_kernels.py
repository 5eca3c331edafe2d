"""Graphs of one custom operator, and how to run them with each set of kernels."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from quill.export.graph.quill_layers import VERSION
from quill.export.operators.library import library_path
from quill.export.verify.runner import Array

KERNELS = ("plain", "avx2", "avxvnni", "avx512")

# In a separate process, since kernels are chosen once in a process.
PROBE = """
import ctypes, sys, numpy, onnxruntime
library, graph, given, out = sys.argv[1:]
kernels = ctypes.CDLL(library).QuillKernels
kernels.restype = ctypes.c_char_p
print(kernels().decode())
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(library)
options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # for `make test-sanitize`
session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
numpy.save(out, session.run(None, dict(numpy.load(given)))[0])
"""


def computed_with(kernels: str, graph: Path, given: Mapping[str, Array]) -> Array | None:
    """The graph's first output. None: this processor lacks the kernels' instructions."""
    given_file, out = graph.with_name("given.npz"), graph.with_name(f"{kernels}.npy")
    with given_file.open("wb") as file:
        np.savez(file, allow_pickle=False, **given)
    arguments = [str(path) for path in (library_path(), graph, given_file, out)]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        env=os.environ | {"QUILL_KERNELS": kernels},
        capture_output=True,
        text=True,
        check=True,
    )
    found: Array = np.load(out)
    return found if done.stdout.strip() == kernels else None


def check_all_kernels_agree(graph: Path, given: Mapping[str, Array]) -> Array:
    """Asserts that every set of kernels computes the same bits; returns the plain kernels'."""
    plain = computed_with("plain", graph, given)
    assert plain is not None
    for kernels in KERNELS[1:]:
        found = computed_with(kernels, graph, given)
        if found is not None:
            np.testing.assert_array_equal(found, plain)
    return plain


def save_operator(
    directory: Path,
    operator: str,
    names: Sequence[str],
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    constants: Mapping[str, Array],
    attributes: Mapping[str, Any],
    version: int = VERSION,
) -> Path:
    """A graph of one operator. `names`: all that it takes, in order; `inputs`, `outputs`: types."""
    node = helper.make_node(operator, list(names), list(outputs), domain="quill")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("quill", version)]
    path = directory / f"{operator}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


FLOAT, INT32 = TensorProto.FLOAT, TensorProto.INT32
