"""Recurrent translators, served: the reference's tokens, drawn and searched, alone and in a crowd.

On real graphs in ONNX Runtime, every cell with every context.
"""

import random
from pathlib import Path

import pytest

from quill.model.network.config import CellKind, ContextKind
from quill.model.reference.beam_search import BeamParameters, beam_search
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters
from quill.server.engine.engine import Engine
from quill.server.outputs import FailEvent, HypothesisEvent, TokenEvent
from quill.server.request import BeamParams, Limits, Request, SamplingParams
from tests.operators import OWN, needs_operators
from tests.server.random_requests import restless_clock
from tests.server.tiny_bundle import CONTEXT, EOS, TinyBundle, make_tiny_recurrent

pytestmark = needs_operators

VOCAB_SIZE = 512
BOS = 0
MAX_ROWS = 6
Answers = dict[str, list[tuple[int, float | None]]]  # tokens, with logprobs where they are told


def make_requests(rng: random.Random, num: int = 24) -> list[Request]:
    """Some greedy, some drawn, some searched."""
    requests = []
    for number in range(num):
        beams = BeamParams(num_beams=3) if number % 4 == 3 else None
        requests.append(
            Request(
                request_id=str(number),
                prompt_ids=(BOS,),
                source_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))),
                sampling=SamplingParams(temperature=0.0 if beams or number % 4 == 0 else 0.8),
                beams=beams,
                seed=rng.getrandbits(64),
                max_new_tokens=rng.choice([9, 50, 60]),
                eos_ids=frozenset({EOS, 100}),
                logprobs=0,
            )
        )
    return requests


def serve(bundle: TinyBundle, precision: str, requests: list[Request], num_blocks: int) -> Answers:
    """All through one engine, one more arriving before every step."""
    rng = random.Random(1)
    limits = Limits(
        max_num_seqs=MAX_ROWS,
        context=CONTEXT,
        num_blocks=num_blocks,
        speculative=False,
        one_token_steps=bundle.manifest.graphs_in(precision).one_token_steps,
    )
    session = bundle.session(precision, num_blocks)
    engine = Engine(session, limits, clock=restless_clock(rng))
    answers: Answers = {request.request_id: [] for request in requests}
    waiting = list(requests)
    while waiting or not engine.is_idle:
        if waiting:
            engine.submit(waiting.pop(0), 0.0)
        for event in engine.step().events:
            assert not isinstance(event, FailEvent), event
            if isinstance(event, TokenEvent):
                assert event.logprobs is not None
                answers[event.request_id].append((event.token_id, event.logprobs.logprob))
            elif isinstance(event, HypothesisEvent):
                answers[event.request_id] += [(token, None) for token in event.token_ids]
    if num_blocks < 100:
        assert engine._scheduler.num_preempted > 0, "so few blocks that some are set back"
    return answers


def reference(bundle: TinyBundle, request: Request) -> tuple[int, ...]:
    stop_ids, most = request.eos_ids, request.max_new_tokens
    if request.beams is not None:
        beams = BeamParameters(num_beams=3, max_new_tokens=most, stop_ids=stop_ids)
        found = beam_search(bundle.model, [BOS], beams, source_ids=request.source_ids, cached=True)
        return found[0].token_ids
    parameters = SamplingParameters(
        **vars(request.sampling), max_new_tokens=most, stop_ids=stop_ids
    )
    source_ids = request.source_ids
    answer = generate(
        bundle.model, [BOS], parameters, request.seed, source_ids=source_ids, cached=True
    )
    return answer.token_ids


@pytest.mark.parametrize("context", ["fixed", "bahdanau"])
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_batch_gets_the_tokens_of_the_reference(
    cell: CellKind, context: ContextKind, tmp_path: Path
) -> None:
    bundle = make_tiny_recurrent(tmp_path / "bundle", cell, context, ("fp32",))
    requests = make_requests(random.Random(0))
    served = serve(bundle, "fp32", requests, num_blocks=17)
    lengths = set()
    for request in requests:
        found = tuple(token for token, _ in served[request.request_id])
        assert found == reference(bundle, request), request
        lengths.add(len(found))
    assert len(lengths) > 3, "some end early, so rows join and leave"


@pytest.mark.portable
@pytest.mark.parametrize("precision", OWN)
def test_batch_gets_the_bits_of_requests_alone(precision: str, tmp_path: Path) -> None:
    bundle = make_tiny_recurrent(tmp_path / "bundle", "lstm", "bahdanau", (precision,))  # type: ignore[arg-type]
    requests = make_requests(random.Random(2), 12)
    crowd = serve(bundle, precision, requests, num_blocks=13)
    for request in requests:
        assert (
            crowd[request.request_id]
            == serve(bundle, precision, [request], 200)[request.request_id]
        )
