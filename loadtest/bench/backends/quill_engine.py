"""Quill's own engine as a backend, without any network.

    python -m quill.loadtest.bench.backends.quill_engine BUNDLE PRECISION THREADS [speculative]

Knows: the server's engine, from a submitted request to its events. Does not know: gRPC, peers.
A step is measured as a server runs it: schedule, run, sample, report.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime

from quill.export.bundle.graph_contract import BLOCK
from quill.loadtest.bench.backends.protocol import (
    MAX_NEW_TOKENS,
    BackendInfo,
    Embedded,
    Logits,
    Score,
    Translated,
    model_arguments,
    score_passages,
    serve,
)
from quill.server.engine.engine import Engine
from quill.server.engine.model_runner import Chunk
from quill.server.errors import CancelledError
from quill.server.loading.engine_factory import open_bundle, open_session
from quill.server.outputs import (
    EmbeddingEvent,
    EngineOutputs,
    Event,
    FailEvent,
    FinishEvent,
    HypothesisEvent,
    TokenEvent,
)
from quill.server.request import (
    BeamParams,
    Limits,
    PoolingParams,
    Request,
    SamplingParams,
    encoder_limits,
)

MAX_NUM_SEQS = 32
SEQUENCE_TOKENS = 1024  # of each sequence, when all run
GREEDY = SamplingParams(temperature=0.0)
SAMPLING = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=1.0),
    "top-k-p": SamplingParams(temperature=1.0, top_k=40, top_p=0.95),
}


class QuillEngine:
    def __init__(
        self, bundle: Path, precision: str, num_threads: int, speculative: bool = False
    ) -> None:
        opened = open_bundle(bundle, precision)
        self._manifest = opened.manifest
        sizes = {file.name: file.size for file in opened.manifest.files}
        version, weight_bytes = f"ORT {onnxruntime.__version__}", sizes[opened.graphs.weights]
        self.info = BackendInfo("Quill", precision, version, weight_bytes)
        context = opened.manifest.sizes.context
        self._max_tokens = min(SEQUENCE_TOKENS, context)
        one_token_steps = opened.graphs.one_token_steps
        match opened.manifest.family:
            case "encoder":
                limits = encoder_limits(max_num_seqs=1, context=context)
            case "seq2seq":
                limits = Limits(
                    max_num_seqs=MAX_NUM_SEQS,
                    context=context,
                    num_blocks=2 * MAX_NUM_SEQS * -(-context // BLOCK),  # of source and answer
                    speculative=not one_token_steps,
                    one_token_steps=one_token_steps,
                )
            case _:  # without prefix caching: no prompt may be cached by an earlier round
                limits = Limits(
                    max_num_seqs=MAX_NUM_SEQS,
                    context=context,
                    num_blocks=(MAX_NUM_SEQS * self._max_tokens + context) // BLOCK,
                    prefix_caching=False,
                    speculative=speculative,
                )
        self._session = open_session(opened, limits, num_threads)
        self._engine = Engine(self._session, limits)
        self._eos_ids = frozenset(opened.manifest.stop_ids)
        self._names = map(str, itertools.count())

    def prefill(self, ids: Sequence[int]) -> float:
        start = time.perf_counter()
        self._submit(prompt_ids=ids, max_new_tokens=1)
        self._finish()
        return time.perf_counter() - start

    def decode(
        self, ids: Sequence[int], num_seqs: int, num_steps: int, sampling: str = "greedy"
    ) -> float:
        name = self._submit(prompt_ids=ids, num_sequences=num_seqs, sampling=SAMPLING[sampling])
        return self._decode(num_steps, [name], num_seqs)

    def ragged(self, prompts: Sequence[Sequence[int]], num_steps: int) -> float:
        """As decode, with prompts of different lengths."""
        # The first sequences generate while the others' prompts are read.
        names = [
            self._submit(prompt_ids=ids, max_new_tokens=self._max_tokens - len(ids))
            for ids in prompts
        ]
        return self._decode(num_steps, names, len(names))

    def _decode(self, num_steps: int, names: Sequence[str], num_seqs: int) -> float:
        started: set[tuple[str, int]] = set()  # sequences whose prompts have been read
        while len(started) < num_seqs:
            events = self._step().events
            started |= {(e.request_id, e.sequence) for e in events if isinstance(e, TokenEvent)}
            assert not self._engine.is_idle, "a sequence ended before the last one started"
        self._step()
        start = time.perf_counter()
        for _ in range(num_steps):
            self._step()
        seconds = time.perf_counter() - start
        for name in names:
            self._engine.end(name, None, "cancelled")
        self._finish()
        return seconds

    def generate(
        self, ids: Sequence[int], num_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> dict[str, Any]:
        """Answers to one prompt, one after the other; their time after each first token."""
        total: dict[str, Any] = {"seconds": 0.0, "num_draft_tokens": 0, "num_accepted": 0}
        answers = []
        for seed in seeds:
            sampling = SamplingParams(temperature=temperature)
            options = {"max_new_tokens": num_tokens, "seed": seed, "eos_ids": self._eos_ids}
            self._submit(prompt_ids=ids, sampling=sampling, **options)
            events: list[Event] = []
            while not any(isinstance(event, TokenEvent) for event in events):
                events += self._step().events
            start = time.perf_counter()
            events += self._finish()
            total["seconds"] += time.perf_counter() - start
            answers.append([event.token_id for event in events if isinstance(event, TokenEvent)])
            [usage] = [event.usage for event in events if isinstance(event, FinishEvent)]
            total["num_draft_tokens"] += usage.draft
            total["num_accepted"] += usage.accepted
        return total | {"answers": answers, "num_tokens": sum(map(len, answers))}

    def score(self, passages: Sequence[Sequence[int]], reference: str | None = None) -> Score:
        return score_passages(passages, reference, self._logits)

    def _logits(self, ids: Sequence[int]) -> Logits:
        """As a step of the engine computes them; a request gets only the most likely tokens."""
        assert self._engine.is_idle, "the blocks of running sequences would be overwritten"
        blocks = range(-(-len(ids) // BLOCK))
        return self._session.step([Chunk(ids, 0, blocks, range(len(ids)))]).logits_LV

    def translate(
        self, sources: Sequence[Sequence[int]], num_beams: int, num_at_once: int
    ) -> Translated:
        """At most so many requests run at once; the next starts when one ends."""
        beams = None if num_beams == 1 else BeamParams(num_beams=num_beams)
        bos = self._manifest.special_tokens.bos
        assert bos is not None
        start, waiting, num_open = time.perf_counter(), iter(sources), 0
        answers: dict[str, list[int]] = {}
        while True:
            for source in itertools.islice(waiting, num_at_once - num_open):
                name = self._submit(
                    prompt_ids=(bos,),
                    source_ids=tuple(source),
                    beams=beams,
                    max_new_tokens=MAX_NEW_TOKENS,
                    eos_ids=self._eos_ids,
                )
                answers[name] = []
                num_open += 1
            if not num_open:
                break
            for event in self._step().events:
                if isinstance(event, TokenEvent):
                    answers[event.request_id].append(event.token_id)
                elif isinstance(event, HypothesisEvent):
                    answers[event.request_id].extend(event.token_ids)
                num_open -= isinstance(event, FinishEvent)
        seconds = time.perf_counter() - start
        return Translated(seconds, [self._without_eos(answer) for answer in answers.values()])

    def _without_eos(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] in self._eos_ids else ids

    def embed(self, texts: Sequence[Sequence[int]]) -> Embedded:
        """All texts in one request."""
        start = time.perf_counter()
        self._submit(pooling=PoolingParams(texts=tuple(map(tuple, texts))), max_new_tokens=0)
        events = [event for event in self._finish() if isinstance(event, EmbeddingEvent)]
        vectors = {event.text: event.vector_D.tolist() for event in events}
        seconds = time.perf_counter() - start
        return Embedded(seconds, [vectors[text] for text in range(len(texts))])

    def _submit(self, prompt_ids: Sequence[int] = (), **options: Any) -> str:
        name = next(self._names)
        request = Request(
            request_id=name, prompt_ids=tuple(prompt_ids), **{"sampling": GREEDY} | options
        )
        self._engine.submit(request, time.monotonic())
        return name

    def _finish(self) -> list[Event]:
        events: list[Event] = []
        while not self._engine.is_idle:
            events += self._step().events
        return events

    def _step(self) -> EngineOutputs:
        outputs = self._engine.step()
        for event in outputs.events:
            if isinstance(event, FailEvent) and not isinstance(event.error, CancelledError):
                raise event.error
        return outputs


if __name__ == "__main__":
    serve(QuillEngine(*model_arguments(sys.argv), "speculative" in sys.argv[4:]))
