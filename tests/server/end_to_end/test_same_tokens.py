"""Same seed, same tokens: alone, in a crowd, at any chunk boundary, with cache hits.

On a real graph in ONNX Runtime, against plain loops that run one request at a time. Logprobs are
compared with `==`, too: a single bit of a logit that differs would show.
"""

import random

import pytest

from quill.model.randomness import sequence_seed, uniform
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters, choose
from quill.server.engine.engine import Engine
from quill.server.engine.model_runner import Chunk, OrtSession
from quill.server.limits import Limits
from quill.server.outputs import PositionLogprobs, StartEvent, TokenEvent
from quill.server.request import Request, SamplingParams
from quill.server.sampling.sampler import position_logprobs
from tests.operators import CROWDS, SERVED
from tests.server.random_requests import Answers, restless_clock, together
from tests.server.tiny_bundle import CONTEXT, TinyBundle

VOCAB_SIZE = 512
NUM_BLOCKS = CONTEXT // 16  # of one sequence


def _alone(session: OrtSession, request: Request) -> Answers:
    """The prompt at once, then token after token, chosen by the reference's rules."""
    answers: Answers = {}
    blocks = range(CONTEXT // 16)
    for sequence in range(request.num_sequences):
        seed = sequence_seed(request.seed, sequence)
        parameters = SamplingParameters(
            **vars(request.sampling),
            stop_ids=request.all_stop_ids,
            min_new_tokens=request.min_new_tokens,
        )
        prompt, answer, reports = list(request.prompt_ids), list[int](), list[PositionLogprobs]()
        last = len(prompt) - 1
        logits_1V, _ = session.step([Chunk(prompt, 0, blocks, [last])])
        for position in range(request.max_new_tokens):
            u = uniform(seed, position)
            answer.append(choose(logits_1V[0], parameters, prompt, answer, u))
            reports += position_logprobs(logits_1V, answer[-1:], [request.logprobs or 0])
            if answer[-1] in request.eos_ids:
                break
            logits_1V, _ = session.step([Chunk(answer[-1:], last + len(answer), blocks, [0])])
        answers[request.request_id, sequence] = reports
    return answers


def _requests(num: int, rng: random.Random) -> list[Request]:
    systems = [[rng.randrange(VOCAB_SIZE) for _ in range(48)] for _ in range(3)]
    requests = []
    for number in range(num):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        prompt = [*rng.choice([[], *systems])[: rng.randint(0, 48)], *own]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.0, 1.5]),
            top_k=rng.choice([0, 0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        )
        max_new_tokens = rng.randint(1, 20)
        requests.append(
            Request(
                request_id=str(number),
                prompt_ids=tuple(prompt),
                sampling=sampling,
                seed=rng.getrandbits(64),
                max_new_tokens=max_new_tokens,
                min_new_tokens=rng.choice([0, 0, max_new_tokens // 2]),
                num_sequences=rng.choice([1, 1, 1, 2, 3]),
                eos_ids=frozenset(rng.sample(range(VOCAB_SIZE), 30)),
                logprobs=rng.choice([0, 3]),
                priority=rng.randint(-1, 1),
            )
        )
    return requests


@pytest.mark.parametrize("precision", SERVED)
@pytest.mark.parametrize("max_num_seqs", CROWDS)
def test_crowd_gets_the_tokens_of_requests_alone(
    tiny_bundle: TinyBundle, precision: str, max_num_seqs: int
) -> None:
    rng = random.Random(max_num_seqs)
    requests = [each for each in _requests(40, rng) if each.num_sequences <= max_num_seqs]
    num_blocks = NUM_BLOCKS + 2 * max_num_seqs  # so few that some are set back
    engine = Engine(
        tiny_bundle.session(precision, num_blocks),
        Limits(max_num_seqs=max_num_seqs, context=CONTEXT, num_blocks=num_blocks),
        clock=restless_clock(rng),
    )
    requests = [each for each in requests if engine.fits(each)]
    crowd = together(engine, requests, rng)
    plain = tiny_bundle.session(precision, NUM_BLOCKS)
    alone: Answers = {}
    for request in requests:
        alone |= _alone(plain, request)
    assert crowd == alone


@pytest.mark.portable
def test_cached_prefix_gives_the_tokens_of_a_computed_one(tiny_bundle: TinyBundle) -> None:
    rng = random.Random(5)
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(100))
    limits = Limits(max_num_seqs=2, context=CONTEXT, num_blocks=4 * NUM_BLOCKS)
    engine = Engine(tiny_bundle.session("fp32", 4 * NUM_BLOCKS), limits)
    answers, cached = list[list[PositionLogprobs | None]](), []
    for name, length in (("first", 100), ("again", 100), ("shorter", 70)):
        request = Request(
            request_id=name, prompt_ids=prompt[:length], seed=3, max_new_tokens=20, logprobs=2
        )
        engine.submit(request, 0.0)
        answer: list[PositionLogprobs | None] = []
        while not engine.is_idle:
            for event in engine.step().events:
                if isinstance(event, StartEvent):
                    cached.append(event.cached)
                if isinstance(event, TokenEvent):
                    answer.append(event.logprobs)
        answers.append(answer)
        alone = _alone(tiny_bundle.session("fp32", NUM_BLOCKS), request)
        assert answer == alone[name, 0]
    assert cached == [0, 96, 64]
    assert answers[0] == answers[1]


@pytest.mark.portable
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engine_gives_the_tokens_of_the_reference_decoder(
    tiny_bundle: TinyBundle, temperature: float
) -> None:
    """PyTorch rounds otherwise than ONNX Runtime, so a draw at an edge might differ: none does."""
    rng = random.Random(7)
    requests = [
        Request(
            request_id=str(number),
            prompt_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))),
            sampling=SamplingParams(temperature=temperature, top_k=50, top_p=0.95),
            seed=rng.getrandbits(64),
            max_new_tokens=12,
            stop_ids=frozenset({1, 2}),
            logprobs=0,
        )
        for number in range(12)
    ]
    limits = Limits(max_num_seqs=4, context=CONTEXT, num_blocks=4 * NUM_BLOCKS)
    engine = Engine(tiny_bundle.session("fp32", 4 * NUM_BLOCKS), limits)
    served = together(engine, requests, rng)
    for request in requests:
        parameters = SamplingParameters(
            **vars(request.sampling), max_new_tokens=12, stop_ids=request.stop_ids
        )
        expected = generate(tiny_bundle.model, request.prompt_ids, parameters, request.seed)
        reports = served[request.request_id, 0]
        assert tuple(report.token_id for report in reports) == expected.token_ids
        logprobs = [report.logprob for report in reports]
        assert logprobs == pytest.approx(expected.logprobs, abs=1e-4)
