"""vLLM on a CPU as a backend.

    python -m quill.loadtest.bench.backends.vllm_cpu DIRECTORY KIND THREADS

Knows: its engine, in this process. Runs in vLLM's own virtual environment (`make peers-vllm`).
A request for logprobs of a prompt gets the most likely tokens only, as objects: 150,000 words for
each token would take minutes. So the logits are taken where the engine computes them for such a
request.
"""

import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quill.loadtest.bench.backends.protocol import (
    BackendInfo,
    Logits,
    Score,
    model_arguments,
    score_passages,
    serve,
    size_of,
)

MAX_PROMPT = 1024  # tokens that a step may read
MAX_NUM_SEQS = 32
MAX_STEPS = 256  # of a sequence whose steps are measured


class VllmCpu:
    """Sequences join and leave between steps."""

    def __init__(self, path: Path, kind: str, num_threads: int) -> None:
        _set_environment(num_threads)
        import vllm  # reads the environment

        self._new_params = vllm.SamplingParams
        weight_bytes = size_of(path / "model.safetensors") // 2  # the file is float32
        self.info = BackendInfo("vLLM", kind, vllm.__version__, weight_bytes)
        self._llm = vllm.LLM(
            str(path),
            dtype=kind,
            max_model_len=MAX_PROMPT,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_PROMPT,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        self._engine = self._llm.llm_engine
        self._names = map(str, itertools.count())

    def prefill(self, ids: Sequence[int]) -> float:
        start = time.perf_counter()
        self._submit(ids, 1)
        self._finish()
        return time.perf_counter() - start

    def decode(self, ids: Sequence[int], num_seqs: int, num_steps: int) -> float:
        names = [self._submit(ids, MAX_STEPS) for _ in range(num_seqs)]
        started = set[str]()
        while len(started) < num_seqs:
            started |= {each.request_id for each in self._engine.step()}
        self._engine.step()
        start = time.perf_counter()
        for _ in range(num_steps):
            self._engine.step()
        seconds = time.perf_counter() - start
        self._engine.abort_request(names)
        self._finish()
        return seconds

    def score(self, passages: Sequence[Sequence[int]], reference: str | None = None) -> Score:
        computed: list[Any] = []

        def watch(model: Any) -> None:
            compute = model.compute_logits

            def compute_logits(*arguments: Any, **options: Any) -> Any:
                computed.append(compute(*arguments, **options))
                return computed[-1]

            model.compute_logits = compute_logits

        def logits_of(ids: Sequence[int]) -> Logits:
            computed.clear()
            self._submit(ids, 1, prompt_logprobs=0)
            self._finish()  # of the last token, whose logits are sampled from, and of the others
            logits_TV: Logits = max(computed, key=len).float().numpy()
            assert len(logits_TV) == len(ids) - 1
            return logits_TV

        self._llm.apply_model(watch)
        return score_passages(passages, reference, logits_of)

    def _submit(self, ids: Sequence[int], num_tokens: int, **options: Any) -> str:
        options |= {"max_tokens": num_tokens, "min_tokens": num_tokens, "ignore_eos": True}
        params = self._new_params(temperature=0.0, detokenize=False, **options)
        name = next(self._names)
        self._engine.add_request(name, {"prompt_token_ids": list(ids)}, params)
        return name

    def _finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()


def _set_environment(num_threads: int) -> None:
    os.environ |= {
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


if __name__ == "__main__":
    serve(VllmCpu(*model_arguments(sys.argv)))
