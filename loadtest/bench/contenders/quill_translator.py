"""Quill's own engine as a translator.

    python -m quill.loadtest.bench.contenders.quill_translator BUNDLE KIND THREADS

Knows: the server's engine. Does not know: gRPC, peers.
As many requests as are allowed at once are always under way: whoever ends makes room for the next.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import onnxruntime

from quill.export.bundle.graph_contract import BLOCK
from quill.loadtest.bench.contenders.protocol import MAX_NEW_TOKENS, About, Translated, serve
from quill.server.limits import Limits
from quill.server.loading.engine_factory import open_bundle, open_engine
from quill.server.outputs import FailEvent, FinishEvent, HypothesisEvent, TokenEvent
from quill.server.request import BeamParams, Request, SamplingParams

MAX_ROWS = 32


class Quill:
    """An engine that serves nobody but the clock."""

    def __init__(self, bundle: Path, precision: str, num_threads: int) -> None:
        opened = open_bundle(bundle, precision)
        self._manifest = opened.manifest
        sizes = {file.name: file.size for file in opened.manifest.files}
        weight_bytes = sizes[opened.graphs.weights]
        self.about = About("Quill", precision, f"ORT {onnxruntime.__version__}", weight_bytes)
        context = opened.manifest.sizes.context
        num_blocks = 2 * MAX_ROWS * -(-context // BLOCK)  # of source and answer
        limits = Limits(
            max_num_seqs=MAX_ROWS,
            context=context,
            num_blocks=num_blocks,
            speculative=not opened.graphs.one_token_steps,
            one_token_steps=opened.graphs.one_token_steps,
        )
        self._engine = open_engine(opened, limits, num_threads)
        self._names = map(str, itertools.count())

    def translate(
        self, sources: Sequence[Sequence[int]], num_beams: int, num_at_once: int
    ) -> Translated:
        start = time.perf_counter()
        requests = [self._request(source, num_beams) for source in sources]
        answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
        waiting, num_open = iter(requests), 0
        while True:
            for request in itertools.islice(waiting, num_at_once - num_open):
                self._engine.submit(request, time.monotonic())
                num_open += 1
            if not num_open:
                break
            num_open -= self._step(answers)
        seconds = time.perf_counter() - start
        ends = set(self._manifest.stop_ids)
        return Translated(seconds, [_text(answer, ends) for answer in answers.values()])

    def _request(self, source: Sequence[int], num_beams: int) -> Request:
        bos = self._manifest.special_tokens.bos
        assert bos is not None
        return Request(
            request_id=next(self._names),
            prompt_ids=(bos,),
            source_ids=tuple(source),
            sampling=SamplingParams(temperature=0.0),
            beams=None if num_beams == 1 else BeamParams(num_beams=num_beams),
            max_new_tokens=MAX_NEW_TOKENS,
            eos_ids=frozenset(self._manifest.stop_ids),
        )

    def _step(self, answers: dict[str, list[int]]) -> int:
        """One step; how many answers ended with it."""
        num_ended = 0
        for event in self._engine.step().events:
            if isinstance(event, FailEvent):
                raise event.error
            if isinstance(event, TokenEvent):
                answers[event.request_id].append(event.token_id)
            elif isinstance(event, HypothesisEvent):
                answers[event.request_id].extend(event.token_ids)
            elif isinstance(event, FinishEvent):
                num_ended += 1
        return num_ended


def _text(answer: list[int], ends: set[int]) -> list[int]:
    return answer[:-1] if answer and answer[-1] in ends else answer


if __name__ == "__main__":
    serve(Quill(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
