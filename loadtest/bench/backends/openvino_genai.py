"""OpenVINO GenAI as a backend: its continuous batching, with a KV cache of 8 bits.

    python -m quill.loadtest.bench.backends.openvino_genai DIRECTORY KIND THREADS

Knows: its pipeline and its model's inputs. Runs in the peers' virtual environment.
The pipeline gives no logits of prompts. So they are computed as it computes them: the same file
becomes a graph with paged attention by the same transformation, and is compiled with the same
properties. Its perplexity is the pipeline's own (`echo` and `logprobs`) but for 0.01%
(SmolLM2-135M and Qwen2.5-Coder-0.5B in int8, version 2026.4.1).
"""

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from openvino._offline_transformations import paged_attention_transformation

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
CACHE_GB = 1
MAX_STEPS = 256  # of a sequence whose steps are measured


class OpenVinoGenAI:
    """Sequences join and leave between steps."""

    def __init__(self, path: Path, kind: str, num_threads: int) -> None:
        weights = path / "openvino_model.bin"
        self.info = BackendInfo(
            "OpenVINO GenAI", kind, openvino_genai.__version__.split("-")[0], size_of(weights)
        )
        self._path = path
        self._properties = {"INFERENCE_NUM_THREADS": num_threads, "KV_CACHE_PRECISION": "u8"}
        config = openvino_genai.SchedulerConfig()
        config.max_num_batched_tokens, config.max_num_seqs = MAX_PROMPT, MAX_NUM_SEQS
        config.cache_size, config.enable_prefix_caching = CACHE_GB, False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            path, config, "CPU", self._properties
        )
        self._names = itertools.count()

    def prefill(self, ids: Sequence[int]) -> float:
        start = time.perf_counter()
        handle = self._submit(ids, 1)  # a request ends when nobody holds its handle
        self._finish()
        (output,) = handle.read_all()
        assert len(output.generated_ids) == 1
        return time.perf_counter() - start

    def decode(self, ids: Sequence[int], num_seqs: int, num_steps: int) -> float:
        handles = [self._submit(ids, MAX_STEPS) for _ in range(num_seqs)]
        while not all(each.can_read() for each in handles):
            self._pipeline.step()
        self._pipeline.step()
        start = time.perf_counter()
        for _ in range(num_steps):
            self._pipeline.step()
        seconds = time.perf_counter() - start
        for each in handles:
            each.cancel()
        self._finish()
        return seconds

    def score(self, passages: Sequence[Sequence[int]], reference: str | None = None) -> Score:
        return score_passages(passages, reference, PagedGraph(self._path, self._properties).logits)

    def _submit(self, ids: Sequence[int], num_tokens: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos, config.do_sample = True, False
        ids_1T = openvino.Tensor(np.array([ids], np.int64))
        return self._pipeline.add_request(next(self._names), ids_1T, config)

    def _finish(self) -> None:
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


class PagedGraph:
    """The graph that the pipeline runs, with the logits of all tokens, for one text at a time."""

    def __init__(self, path: Path, properties: dict[str, Any]) -> None:
        core = openvino.Core()
        model = core.read_model(path / "openvino_model.xml")
        paged_attention_transformation(model)
        compiled = core.compile_model(model, "CPU", properties)
        self._request = compiled.create_infer_request()
        self._inputs = set[str]()
        for port in compiled.inputs:
            name, sizes = port.get_any_name(), port.get_partial_shape()
            if name.startswith(("key_cache.", "value_cache.")):  # blocks · heads · positions · size
                if name.startswith("value"):
                    self._block = sizes[2].get_length()
                shape = [MAX_PROMPT // 16, *(size.get_length() for size in list(sizes)[1:])]
                self._request.set_tensor(port, openvino.Tensor(port.get_element_type(), shape))
            else:
                self._inputs.add(name)

    def logits(self, ids: Sequence[int]) -> Logits:
        num_blocks = -(-len(ids) // self._block)
        inputs = {
            "input_ids": np.array(ids, np.int64),
            "position_ids": np.arange(len(ids), dtype=np.int64),
            "past_lens": np.zeros(1, np.int32),
            "subsequence_begins": np.array([0, len(ids)], np.int32),
            "block_indices": np.arange(num_blocks, dtype=np.int32),
            "block_indices_begins": np.array([0, num_blocks], np.int32),
            "max_context_len": np.array(len(ids), np.int32),
        }
        for name in self._inputs:
            self._request.set_tensor(name, openvino.Tensor(inputs[name]))
        self._request.infer()
        logits: Logits = self._request.get_output_tensor(0).data
        return logits.reshape(len(ids), -1).astype(np.float32)


if __name__ == "__main__":
    serve(OpenVinoGenAI(*model_arguments(sys.argv)))
