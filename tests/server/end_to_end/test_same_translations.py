"""Same seed, same translation: alone, in a crowd, with sources of any length side by side.

On a real encoder and decoder in ONNX Runtime, against the reference and against plain loops.
Logprobs are compared with `==` where only the batch differs.
"""

import random

import pytest

from quill.model.randomness import sequence_seed, uniform
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters, choose
from quill.server.engine.engine import Engine
from quill.server.engine.model_runner import Chunk, OrtSession, Source
from quill.server.limits import Limits
from quill.server.outputs import PositionLogprobs
from quill.server.request import Request, SamplingParams
from quill.server.sampling.sampler import position_logprobs
from tests.operators import CROWDS, SERVED
from tests.server.random_requests import Answers, restless_clock, together
from tests.server.tiny_bundle import CONTEXT, EOS, TinyBundle, rounding_error

VOCAB_SIZE = 512
NUM_BLOCKS = CONTEXT // 16  # of one text, or one source
BOS = 0


def _alone(session: OrtSession, request: Request) -> Answers:
    """The source at once, then token after token, chosen by the reference's rules."""
    assert request.source_ids is not None
    answers: Answers = {}
    for sequence in range(request.num_sequences):
        seed = sequence_seed(request.seed, sequence)
        parameters = SamplingParameters(**vars(request.sampling))
        text, reports = [BOS], list[PositionLogprobs]()
        own, foreign = range(NUM_BLOCKS), range(NUM_BLOCKS, 2 * NUM_BLOCKS)
        session.encode([Source(request.source_ids, foreign)])
        length = len(request.source_ids)
        for position in range(request.max_new_tokens):
            chunk = Chunk(text[-1:], position, own, [0], foreign, length)
            logits_1V, _ = session.step([chunk])
            token = choose(logits_1V[0], parameters, [BOS], text[1:], uniform(seed, position))
            reports += position_logprobs(logits_1V, [token], [request.logprobs or 0])
            text.append(token)
            if token in request.eos_ids:
                break
        answers[request.request_id, sequence] = reports
    return answers


def _requests(num: int, rng: random.Random) -> list[Request]:
    return [
        Request(
            request_id=str(number),
            prompt_ids=(BOS,),
            source_ids=tuple(
                rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 9, 40, CONTEXT]))
            ),
            sampling=SamplingParams(
                temperature=rng.choice([0.0, 0.8, 1.0, 1.5]),
                top_k=rng.choice([0, 0, 20]),
                top_p=rng.choice([1.0, 0.9]),
                repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            ),
            seed=rng.getrandbits(64),
            max_new_tokens=rng.randint(1, 20),
            num_sequences=rng.choice([1, 1, 1, 2, 3]),
            eos_ids=frozenset({EOS, *rng.sample(range(VOCAB_SIZE), 30)}),
            logprobs=rng.choice([0, 3]),
            priority=rng.randint(-1, 1),
        )
        for number in range(num)
    ]


@pytest.mark.parametrize("precision", SERVED)
@pytest.mark.parametrize("max_num_seqs", CROWDS)
def test_crowd_gets_the_translations_of_requests_alone(
    tiny_translator: TinyBundle, precision: str, max_num_seqs: int
) -> None:
    rng = random.Random(max_num_seqs)
    requests = [each for each in _requests(40, rng) if each.num_sequences <= max_num_seqs]
    num_blocks = 2 * NUM_BLOCKS + 2 * max_num_seqs  # so few that some are set back
    engine = Engine(
        tiny_translator.session(precision, num_blocks),
        Limits(max_num_seqs=max_num_seqs, context=CONTEXT, num_blocks=num_blocks),
        clock=restless_clock(rng),
    )
    requests = [each for each in requests if engine.fits(each)]
    crowd = together(engine, requests, rng)
    plain = tiny_translator.session(precision, 2 * NUM_BLOCKS)
    alone: Answers = {}
    for request in requests:
        alone |= _alone(plain, request)
    assert crowd == alone


@pytest.mark.portable
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engine_gives_the_translations_of_the_reference_decoder(
    tiny_translator: TinyBundle, temperature: float
) -> None:
    rng = random.Random(7)
    requests = [
        Request(
            request_id=str(number),
            prompt_ids=(BOS,),
            source_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))),
            sampling=SamplingParams(temperature=temperature, top_k=50, top_p=0.95),
            seed=rng.getrandbits(64),
            max_new_tokens=12,
            stop_ids=frozenset({EOS, *range(100, 120)}),
            logprobs=0,
        )
        for number in range(24)
    ]
    limits = Limits(max_num_seqs=4, context=CONTEXT, num_blocks=8 * NUM_BLOCKS)
    engine = Engine(tiny_translator.session("fp32", 8 * NUM_BLOCKS), limits)
    served = together(engine, requests, rng)
    lengths = set()
    # A logprob is a logit less the logarithm of a sum: each may be off by the rounding.
    tolerance = 2 * rounding_error(tiny_translator.model)
    assert tolerance < 5e-3, "rounding alone would hide what is looked for"
    for request in requests:
        parameters = SamplingParameters(
            **vars(request.sampling), max_new_tokens=12, stop_ids=request.stop_ids
        )
        expected = generate(
            tiny_translator.model, [BOS], parameters, request.seed, source_ids=request.source_ids
        )
        reports = served[request.request_id, 0]
        assert tuple(report.token_id for report in reports) == expected.token_ids
        logprobs = [report.logprob for report in reports]
        assert logprobs == pytest.approx(expected.logprobs, abs=tolerance)
        lengths.add(len(reports))
    assert len(lengths) > 1, "some end early, so rows join and leave"
