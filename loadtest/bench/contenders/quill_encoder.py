"""Quill's own engine as an encoder.

    python -m quill.loadtest.bench.contenders.quill_encoder BUNDLE KIND THREADS

Knows: the server's engine. Does not know: gRPC, peers.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import onnxruntime

from quill.loadtest.bench.contenders.protocol import About, Embedded, serve
from quill.server.limits import encoder_limits
from quill.server.loading.engine_factory import open_bundle, open_engine
from quill.server.outputs import EmbeddingEvent, FailEvent
from quill.server.request import PoolingParams, Request


class Quill:
    """An engine that serves nobody but the clock."""

    def __init__(self, bundle: Path, precision: str, num_threads: int) -> None:
        opened = open_bundle(bundle, precision)
        sizes = {file.name: file.size for file in opened.manifest.files}
        weight_bytes = sizes[opened.graphs.weights]
        self.about = About("Quill", precision, f"ORT {onnxruntime.__version__}", weight_bytes)
        limits = encoder_limits(max_num_seqs=1, context=opened.manifest.sizes.context)
        self._engine = open_engine(opened, limits, num_threads)

    def embed(self, texts: Sequence[Sequence[int]]) -> Embedded:
        """All in one call, as a client would send them."""
        vectors: dict[int, list[float]] = {}
        start = time.perf_counter()
        reading = PoolingParams(texts=tuple(map(tuple, texts)))
        request = Request(request_id="bench", pooling=reading, max_new_tokens=0)
        self._engine.submit(request, time.monotonic())
        while not self._engine.is_idle:
            for event in self._engine.step().events:
                if isinstance(event, FailEvent):
                    raise event.error
                if isinstance(event, EmbeddingEvent):
                    vectors[event.text] = event.vector_D.tolist()
        seconds = time.perf_counter() - start
        return Embedded(seconds, [vectors[text] for text in range(len(texts))])


if __name__ == "__main__":
    serve(Quill(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
