"""ONNX Runtime with padding: the same graph, in batches as long as their longest text.

    python -m quill.loadtest.bench.backends.padded_onnx BUNDLE KIND THREADS BATCH

Knows: the graphs' contract. Does not know: Quill's engine.
The padding of a text is packed behind it as a sequence of its own, which no other token attends
to. It takes part in all matrix products, as in any padded batch, and in less attention.
"""

import os
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

from quill.export.bundle import graph_contract
from quill.export.bundle.manifest import read_manifest
from quill.export.operators.library import library_path
from quill.loadtest.bench.backends.protocol import BackendInfo, Embedded, model_arguments, serve


class PaddedOnnx:
    def __init__(self, bundle: Path, precision: str, num_threads: int, batch_size: int) -> None:
        manifest = read_manifest(bundle)
        graphs = manifest.graphs_in(precision)
        assert graphs.encoder is not None
        sizes = {file.name: file.size for file in manifest.files}
        kind = f"{precision}, padded batches of {batch_size}"
        version = onnxruntime.__version__
        self.info = BackendInfo("ONNX Runtime", kind, version, sizes[graphs.weights])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.log_severity_level = 3
        options.register_custom_ops_library(os.fspath(library_path()))
        self._session = onnxruntime.InferenceSession(
            bundle / graphs.encoder, options, providers=["CPUExecutionProvider"]
        )
        self._has_segments = bool(manifest.sizes.num_segments)
        self._batch_size = batch_size

    def embed(self, texts: Sequence[Sequence[int]]) -> Embedded:
        start = time.perf_counter()
        vectors: list[list[float]] = []
        for first in range(0, len(texts), self._batch_size):
            vectors += self._batch(texts[first : first + self._batch_size])
        return Embedded(time.perf_counter() - start, vectors)

    def _batch(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        longest = max(map(len, texts))
        lengths = [
            length for text in texts for length in (len(text), longest - len(text)) if length
        ]
        ids_BT = np.zeros((len(texts), longest), np.int64)
        for row, text in enumerate(texts):
            ids_BT[row, : len(text)] = text
        positions = np.fromiter(chain.from_iterable(map(range, lengths)), np.int64)
        inputs: dict[str, npt.NDArray[np.int64] | npt.NDArray[np.int32]] = {
            graph_contract.INPUT_IDS: ids_BT.ravel(),
            graph_contract.POSITIONS: positions,
            graph_contract.QUERY_STARTS: np.cumsum([0, *lengths]).astype(np.int32),
            graph_contract.LOGIT_INDICES: np.empty(0, np.int64),
        }
        if self._has_segments:
            inputs[graph_contract.SEGMENTS] = np.zeros(ids_BT.size, np.int64)
        (hidden_ND,) = self._session.run([graph_contract.HIDDEN], inputs)
        hidden_BTD = hidden_ND.reshape(*ids_BT.shape, -1)
        pairs = zip(hidden_BTD, texts, strict=True)
        return [hidden_TD[: len(text)].mean(axis=0).tolist() for hidden_TD, text in pairs]


if __name__ == "__main__":
    serve(PaddedOnnx(*model_arguments(sys.argv), int(sys.argv[4])))
