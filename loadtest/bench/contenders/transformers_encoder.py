"""transformers as an encoder, one text after another.

    python -m quill.loadtest.bench.contenders.transformers_encoder DIRECTORY KIND THREADS

Knows: its forward pass. Runs in a virtual environment that has torch and transformers.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from quill.loadtest.bench.contenders.protocol import About, Embedded, serve, size_of


class Transformers:
    """PyTorch, eager, float32."""

    def __init__(self, path: Path, kind: str, num_threads: int) -> None:
        self.about = About("transformers", kind, transformers.__version__, size_of(path))
        torch.set_num_threads(num_threads)
        self._model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]]) -> Embedded:
        start = time.perf_counter()
        vectors = [
            self._model(torch.tensor([list(text)])).last_hidden_state[0].mean(dim=0).tolist()
            for text in texts
        ]
        return Embedded(time.perf_counter() - start, vectors)


if __name__ == "__main__":
    serve(Transformers(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
