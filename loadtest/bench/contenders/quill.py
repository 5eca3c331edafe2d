"""Quill's own engine as a contender, with no network around it.

    python -m quill.loadtest.bench.contenders.quill BUNDLE PRECISION THREADS [guess]

Knows: the server's engine, from submitting a request to its events. Does not know: gRPC, peers.
It measures what a server does in a step: planning, running, choosing, reporting.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

from quill.export.bundle.graph_contract import BLOCK
from quill.loadtest.bench.contenders.protocol import About, Score, serve
from quill.server.errors import CancelledError
from quill.server.limits import Limits
from quill.server.loading.engine_factory import EngineSettings, open_bundle, open_engine
from quill.server.outputs import (
    EngineOutputs,
    Event,
    FailEvent,
    FinishEvent,
    PromptEvent,
    TokenEvent,
)
from quill.server.request import Request, SamplingParams

MAX_ROWS = 32
ROW_TOKENS = 1024  # of each, when all rows run
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=1.0),
    "cut": SamplingParams(temperature=1.0, top_k=40, top_p=0.95),
}


@dataclass(frozen=True)
class Written:
    """An answer, and how long it took after its first token."""

    seconds: float
    token_ids: list[int]
    num_draft_tokens: int
    num_accepted: int


class Quill:
    """An engine that serves nobody but the clock."""

    def __init__(
        self, bundle: Path, precision: str, num_threads: int, speculative: bool = False
    ) -> None:
        opened = open_bundle(bundle, precision)
        sizes = {file.name: file.size for file in opened.manifest.files}
        weight_bytes = sizes[opened.graphs.weights]
        self.about = About("Quill", precision, f"ORT {onnxruntime.__version__}", weight_bytes)
        context = opened.manifest.sizes.context
        self._max_tokens = min(ROW_TOKENS, context)
        # Each step is a token of each row, and no prompt was read before.
        limits = Limits(
            max_num_seqs=MAX_ROWS,
            context=context,
            num_blocks=(MAX_ROWS * self._max_tokens + context) // BLOCK,
            prefix_caching=False,
            speculative=speculative,
        )
        self._engine = open_engine(opened, EngineSettings(limits=limits, num_threads=num_threads))
        self._eos_ids = frozenset(opened.manifest.stop_ids)
        self._names = map(str, itertools.count())

    def prefill(self, ids: Sequence[int]) -> float:
        start = time.perf_counter()
        self._submit(ids, max_new_tokens=1)
        self._finish()
        return time.perf_counter() - start

    def decode(
        self, ids: Sequence[int], num_rows: int, num_steps: int, sampling: str = "greedy"
    ) -> float:
        name = self._submit(ids, num_sequences=num_rows, sampling=SAMPLINGS[sampling])
        return self._decode(num_steps, [name], num_rows)

    def write(self, ids: Sequence[int], num_tokens: int, temperature: float, seed: int) -> Written:
        """An answer to the end, or so many tokens of it."""
        wishes = {"max_new_tokens": num_tokens, "seed": seed, "eos_ids": self._eos_ids}
        self._submit(ids, sampling=SamplingParams(temperature=temperature), **wishes)
        events: list[Event] = []
        while not any(isinstance(event, TokenEvent) for event in events):
            events += self._step().events
        start = time.perf_counter()
        events += self._finish()
        seconds = time.perf_counter() - start
        tokens = [event.token_id for event in events if isinstance(event, TokenEvent)]
        [usage] = [event.usage for event in events if isinstance(event, FinishEvent)]
        return Written(seconds, tokens, usage.draft, usage.accepted)

    def ragged(self, prompts: Sequence[Sequence[int]], num_steps: int) -> float:
        """As decode, with prompts of different lengths."""
        # Those that are read first answer for as long as the others are read.
        names = [self._submit(ids, max_new_tokens=self._max_tokens - len(ids)) for ids in prompts]
        return self._decode(num_steps, names, len(names))

    def _decode(self, num_steps: int, names: Sequence[str], num_rows: int) -> float:
        begun: set[tuple[str, int]] = set()  # rows that answer: others' prompts are still read
        while len(begun) < num_rows:
            events = self._step().events
            begun |= {(e.request_id, e.sequence) for e in events if isinstance(e, TokenEvent)}
            assert not self._engine.is_idle, "a row ended before the last one began"
        self._step()
        start = time.perf_counter()
        for _ in range(num_steps):
            self._step()
        seconds = time.perf_counter() - start
        for name in names:
            self._engine.end(name, None, "cancelled")
        self._finish()
        return seconds

    def score(self, passages: Sequence[Sequence[int]]) -> Score:
        nats, num_tokens = 0.0, 0
        for ids in passages:
            self._submit(ids, max_new_tokens=0, prompt_logprobs=0)
            for event in self._finish():
                if isinstance(event, PromptEvent):
                    found = [each.logprob for each in event.logprobs if each.logprob is not None]
                    nats -= sum(found)
                    num_tokens += len(found)
        return Score(nats, num_tokens)

    def _submit(self, ids: Sequence[int], **wishes: Any) -> str:
        name = next(self._names)
        request = Request(request_id=name, prompt_ids=tuple(ids), **{"sampling": GREEDY} | wishes)
        self._engine.submit(request, time.monotonic())
        return name

    def _finish(self) -> list[Event]:
        events: list[Event] = []
        while not self._engine.is_idle:
            events += self._step().events
        return events

    def _step(self) -> EngineOutputs:
        batch = self._engine.step()
        for event in batch.events:
            if isinstance(event, FailEvent) and not isinstance(event.error, CancelledError):
                raise event.error
        return batch


if __name__ == "__main__":
    serve(Quill(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), "speculative" in sys.argv[4:]))
