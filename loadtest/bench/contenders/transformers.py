"""transformers as a contender.

    python -m quill.loadtest.bench.contenders.transformers DIRECTORY KIND THREADS

Knows: its forward pass with a cache. Runs in the peers' virtual environment, the only place in this
room that loads torch.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from quill.loadtest.bench.contenders.protocol import About, Score, serve, size_of


class Transformers:
    """PyTorch, eager, float32."""

    def __init__(self, path: Path, kind: str, num_threads: int) -> None:
        self.about = About("transformers", kind, transformers.__version__, size_of(path))
        torch.set_num_threads(num_threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model.eval()

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> float:
        ids_1T = torch.tensor([list(ids)])
        start = time.perf_counter()
        self._model(ids_1T, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(dim=-1)
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode(self, ids: Sequence[int], num_rows: int, num_steps: int) -> float:
        ids_RT = torch.tensor([list(ids)] * num_rows)
        output = self._model(ids_RT, use_cache=True, logits_to_keep=1)
        ids_R1 = output.logits[:, -1:].argmax(dim=-1)
        start = 0.0
        for step in range(num_steps + 1):
            if step == 1:
                start = time.perf_counter()
            output = self._model(ids_R1, past_key_values=output.past_key_values, use_cache=True)
            ids_R1 = output.logits[:, -1:].argmax(dim=-1)
        return time.perf_counter() - start

    @torch.inference_mode()
    def score(self, passages: Sequence[Sequence[int]]) -> Score:
        nats, num_tokens = 0.0, 0
        for ids in passages:
            ids_T = torch.tensor(list(ids))
            logits_TV = self._model(ids_T[None]).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits_TV, ids_T[1:], reduction="sum")
            nats += float(loss)
            num_tokens += len(ids) - 1
        return Score(nats, num_tokens)


if __name__ == "__main__":
    serve(Transformers(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
