"""transformers as a backend.

    python -m quill.loadtest.bench.backends.transformers DIRECTORY KIND THREADS

Knows: its forward pass with a cache. Runs in the peers' virtual environment: it needs torch.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from quill.loadtest.bench.backends.protocol import (
    BackendInfo,
    Embedded,
    Logits,
    Score,
    model_arguments,
    score_passages,
    serve,
    size_of,
)


class Transformers:
    """PyTorch, eager, float32."""

    def __init__(self, path: Path, kind: str, num_threads: int) -> None:
        self.info = BackendInfo("transformers", kind, transformers.__version__, size_of(path))
        torch.set_num_threads(num_threads)
        config = transformers.AutoConfig.from_pretrained(path)
        is_causal = any("CausalLM" in name for name in config.architectures or ())
        kinds = transformers.AutoModelForCausalLM, transformers.AutoModel
        self._model = kinds[not is_causal].from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> float:
        ids_1T = torch.tensor([list(ids)])
        start = time.perf_counter()
        self._model(ids_1T, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(dim=-1)
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode(self, ids: Sequence[int], num_seqs: int, num_steps: int) -> float:
        ids_RT = torch.tensor([list(ids)] * num_seqs)
        output = self._model(ids_RT, use_cache=True, logits_to_keep=1)
        ids_R1 = output.logits[:, -1:].argmax(dim=-1)
        start = 0.0
        for step in range(num_steps + 1):
            if step == 1:
                start = time.perf_counter()
            output = self._model(ids_R1, past_key_values=output.past_key_values, use_cache=True)
            ids_R1 = output.logits[:, -1:].argmax(dim=-1)
        return time.perf_counter() - start

    def score(self, passages: Sequence[Sequence[int]], reference: str | None = None) -> Score:
        return score_passages(passages, reference, self._logits)

    @torch.inference_mode()
    def _logits(self, ids: Sequence[int]) -> Logits:
        logits_TV: Logits = self._model(torch.tensor([list(ids)])).logits[0].numpy()
        return logits_TV

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]]) -> Embedded:
        """An encoder's, one text after another."""
        start = time.perf_counter()
        vectors = [
            self._model(torch.tensor([list(text)])).last_hidden_state[0].mean(dim=0).tolist()
            for text in texts
        ]
        return Embedded(time.perf_counter() - start, vectors)


if __name__ == "__main__":
    serve(Transformers(*model_arguments(sys.argv)))
