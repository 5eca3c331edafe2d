"""Runs a graph with each of the kernels that Quill's own operators have."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quill.export.operators.library import library_path
from quill.export.verify.runner import Array

KERNELS = ("plain", "avx2", "avx512")

# In a process of its own, since kernels are chosen once in a process.
PROBE = """
import ctypes, sys, numpy, onnxruntime
library, graph, given, out = sys.argv[1:]
kernels = ctypes.CDLL(library).QuillKernels
kernels.restype = ctypes.c_char_p
print(kernels().decode())
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(library)
session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
numpy.save(out, session.run(None, dict(numpy.load(given)))[0])
"""


def computed_with(kernels: str, graph: Path, given: Mapping[str, Array]) -> Array | None:
    """The graph's first output. None: this processor hasn't what the kernels need."""
    given_file, out = graph.with_name("given.npz"), graph.with_name(f"{kernels}.npy")
    with given_file.open("wb") as file:
        np.savez(file, allow_pickle=False, **given)
    arguments = [str(path) for path in (library_path(), graph, given_file, out)]
    said = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        env=os.environ | {"QUILL_KERNELS": kernels},
        capture_output=True,
        text=True,
        check=True,
    )
    found: Array = np.load(out)
    return found if said.stdout.strip() == kernels else None
