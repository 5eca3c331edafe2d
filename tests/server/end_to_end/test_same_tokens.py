"""Same seed, same tokens: alone or batched, at any chunk boundary, after cache hits and preemption.

On real graphs in ONNX Runtime, against a plain loop that runs one request at a time and in which a
new matcher follows the whole answer for each token. Logprobs are compared with `==`, too: a single
bit of a logit that differs would show.
"""

import json
import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from quill.model.data.tokenizer import byte_tokenizer
from quill.model.randomness import sequence_seed, uniform
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters, choose
from quill.server.engine.engine import Engine
from quill.server.engine.model_runner import Chunk, OrtSession, Source
from quill.server.grammar import constraint_source as source
from quill.server.grammar.compiler import Compiler
from quill.server.outputs import PositionLogprobs, StartEvent, TokenEvent
from quill.server.request import Constraint, Grammar, Limits, Request, SamplingParams
from quill.server.sampling.sampler import position_logprobs
from quill.server.tools import TOOL_CALL_FORMATS
from tests.operators import CROWDS, SERVED
from tests.server.random_requests import Answers, restless_clock, together
from tests.server.tiny_bundle import CONTEXT, EOS, TinyBundle, make_tiny_hybrid, rounding_error

VOCAB_SIZE = 512
BOS = END_OF_TEXT = 0
NUM_BLOCKS = CONTEXT // 16  # of one sequence, or one source
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "bcd"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["kind", "n"],
}
TOOLS = (
    source.ToolSchema("tools[0].parameters", "f", json.dumps(SCHEMA)),
    source.ToolSchema("tools[1].parameters", "g", ""),
)


def whole(text: str) -> list[str]:
    """No special token is in any text."""
    return [text]


CONSTRAINTS = (
    Constraint("json_schema", json.dumps(SCHEMA)),
    Constraint("json_object", "true"),
    Constraint("regex", "[a-z ]{3,30}\\."),
    Constraint("choice", '["yes", "no", "nobody knows"]'),
    *(
        source.tool_constraint(TOOLS, format_, whole, may_speak=may_speak, several=True)
        for format_ in TOOL_CALL_FORMATS
        for may_speak in (False, True)
    ),
    None,
)
Kind = Literal["causal", "hybrid", "constrained", "seq2seq"]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    path: Path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    byte_tokenizer().save(path)
    return Compiler(path.read_text(), VOCAB_SIZE, [END_OF_TEXT])


@pytest.fixture(scope="module")
def tiny_hybrid(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return make_tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "hybrid")


@pytest.fixture
def bundle(kind: Kind, request: pytest.FixtureRequest) -> TinyBundle:
    names = {"seq2seq": "tiny_translator", "hybrid": "tiny_hybrid"}
    found: TinyBundle = request.getfixturevalue(names.get(kind, "tiny_bundle"))
    return found


def _mask(grammar: Grammar | None, answer: list[int]) -> npt.NDArray[np.bool_] | None:
    if grammar is None:
        return None
    matcher = grammar.matcher()
    for token in answer:
        matcher.accept(token)
    (mask,) = matcher.masks((), (), 0)
    bits = np.unpackbits(mask.view(np.uint8), count=VOCAB_SIZE, bitorder="little")
    return bits.astype(np.bool_)


def _alone(session: OrtSession, request: Request, grammars: Compiler | None = None) -> Answers:
    """The prompt at once, then token after token, sampled by the reference's rules."""
    grammar = None
    if request.constraint is not None and grammars is not None:
        grammar = grammars.compile_now(request.constraint)
    answers: Answers = {}
    own, foreign = range(NUM_BLOCKS), range(NUM_BLOCKS, 2 * NUM_BLOCKS)
    beside = ((), 0) if request.source_ids is None else (foreign, len(request.source_ids))
    parameters = SamplingParameters(
        **vars(request.sampling),
        stop_ids=request.all_stop_ids,
        min_new_tokens=request.min_new_tokens,
    )
    for sequence in range(request.num_sequences):
        if request.source_ids is not None:
            session.encode([Source(request.source_ids, foreign)])
        seed, prompt = sequence_seed(request.seed, sequence), list(request.prompt_ids)
        answer, reports, new, start = list[int](), list[PositionLogprobs](), prompt, 0
        while len(answer) < request.max_new_tokens:
            logits_1V, _ = session.step([Chunk(new, start, own, [len(new) - 1], *beside)])
            u, mask_V = uniform(seed, len(answer)), _mask(grammar, answer)
            answer.append(choose(logits_1V[0], parameters, prompt, answer, u, mask_V))
            reports += position_logprobs(logits_1V, answer[-1:], [request.logprobs or 0])
            start += len(new)
            new = answer[-1:]
            if answer[-1] in request.all_stop_ids:
                break
        answers[request.request_id, sequence] = reports
    return answers


def _ids(rng: random.Random, num: int, first: int = 0, last: int = VOCAB_SIZE) -> tuple[int, ...]:
    return tuple(rng.randrange(first, last) for _ in range(num))


def _requests(kind: Kind, rng: random.Random, num: int) -> list[Request]:
    prefixes = [(), *(_ids(rng, 48) for _ in range(3))]
    requests = []
    for number in range(num):
        prompt = (*rng.choice(prefixes)[: rng.randint(0, 48)], *_ids(rng, rng.randint(1, 40)))
        max_new_tokens = rng.randint(1, 20)
        fields: dict[str, Any] = {
            "prompt_ids": prompt,
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": rng.choice([0, 0, max_new_tokens // 2]),
            "num_sequences": rng.choice([1, 1, 1, 2, 3]),
            "eos_ids": frozenset(rng.sample(range(VOCAB_SIZE), 30)),
        }
        if kind == "seq2seq":
            length = rng.choice([1, 2, 9, 40, CONTEXT])
            fields |= {"prompt_ids": (BOS,), "source_ids": _ids(rng, length)}
        elif kind == "constrained":
            fields |= {
                "prompt_ids": _ids(rng, rng.randint(1, 40), 1, 256),
                "constraint": rng.choice(CONSTRAINTS),
                "max_new_tokens": rng.randint(5, 60),
                "min_new_tokens": 0,
                "eos_ids": frozenset({END_OF_TEXT}),
            }
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.0, 1.5]),
            top_k=rng.choice([0, 0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        )
        common: dict[str, Any] = {"seed": rng.getrandbits(64), "priority": rng.randint(-1, 1)}
        common |= {"logprobs": rng.choice([0, 3])}
        request = Request(request_id=str(number), sampling=sampling, **common, **fields)
        requests.append(request)
    return requests


@pytest.mark.parametrize("precision", SERVED)
@pytest.mark.parametrize("max_num_seqs", CROWDS)
@pytest.mark.parametrize(
    ("kind", "num"), [("causal", 40), ("hybrid", 24), ("constrained", 24), ("seq2seq", 40)]
)
def test_batched_requests_get_the_tokens_of_requests_alone(
    bundle: TinyBundle, grammars: Compiler, precision: str, max_num_seqs: int, kind: Kind, num: int
) -> None:
    rng = random.Random(max_num_seqs)
    num_blocks = (2 if kind == "seq2seq" else 1) * NUM_BLOCKS + 2 * max_num_seqs  # for preemptions
    limits = Limits(max_num_seqs=max_num_seqs, context=CONTEXT, num_blocks=num_blocks)
    session = bundle.session(precision, num_blocks)
    engine = Engine(session, limits, clock=restless_clock(rng))
    requests = [each for each in _requests(kind, rng, num) if engine.fits(each)]
    batched = together(engine, requests, rng, grammars)
    plain, alone = bundle.session(precision, 2 * NUM_BLOCKS), Answers()
    for request in requests:
        alone |= _alone(plain, request, grammars)
    assert batched == alone


@pytest.mark.portable
def test_cached_prefix_gives_the_tokens_of_a_computed_one(tiny_bundle: TinyBundle) -> None:
    prompt = _ids(random.Random(5), 100)
    limits = Limits(max_num_seqs=2, context=CONTEXT, num_blocks=4 * NUM_BLOCKS)
    engine = Engine(tiny_bundle.session("fp32", 4 * NUM_BLOCKS), limits)
    answers, cached = list[list[PositionLogprobs | None]](), []
    for name, length in (("first", 100), ("again", 100), ("shorter", 70)):
        request = Request(
            request_id=name, prompt_ids=prompt[:length], seed=3, max_new_tokens=20, logprobs=2
        )
        engine.submit(request, 0.0)
        events = list[object]()
        while not engine.is_idle:
            events += engine.step().events
        cached += [each.cached for each in events if isinstance(each, StartEvent)]
        answers.append([each.logprobs for each in events if isinstance(each, TokenEvent)])
        alone = _alone(tiny_bundle.session("fp32", NUM_BLOCKS), request)
        assert answers[-1] == alone[name, 0]
    assert cached == [0, 96, 64]
    assert answers[0] == answers[1]


@pytest.mark.portable
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["causal", "hybrid", "seq2seq"])
def test_engine_gives_the_tokens_of_the_reference_decoder(
    bundle: TinyBundle, kind: Kind, temperature: float
) -> None:
    """PyTorch rounds otherwise than ONNX Runtime, so samples at an edge might differ: none does."""
    rng = random.Random(7)
    is_causal = kind != "seq2seq"
    stops = {"causal": [1, 2], "hybrid": range(60), "seq2seq": [EOS, *range(100, 120)]}
    stop_ids = frozenset(stops[kind])
    requests = [
        Request(
            request_id=str(number),
            prompt_ids=text if is_causal else (BOS,),
            source_ids=None if is_causal else text,
            sampling=SamplingParams(temperature=temperature, top_k=50, top_p=0.95),
            seed=rng.getrandbits(64),
            max_new_tokens=12,
            stop_ids=stop_ids,
            logprobs=0,
        )
        for number, text in enumerate(_ids(rng, rng.randint(1, 60)) for _ in range(24))
    ]
    limits = Limits(max_num_seqs=4, context=CONTEXT, num_blocks=8 * NUM_BLOCKS)
    served = together(Engine(bundle.session("fp32", 8 * NUM_BLOCKS), limits), requests, rng)
    # A logprob is a logit less the logarithm of a sum: each may be off by the rounding.
    tolerance = 1e-4 if is_causal else 2 * rounding_error(bundle.model)
    assert tolerance < 5e-3, "rounding alone would hide what is looked for"
    for request in requests:
        parameters = SamplingParameters(
            **vars(request.sampling), max_new_tokens=12, stop_ids=stop_ids
        )
        expected = generate(
            *(bundle.model, request.prompt_ids, parameters, request.seed),
            source_ids=request.source_ids,
        )
        reports = served[request.request_id, 0]
        assert tuple(report.token_id for report in reports) == expected.token_ids
        logprobs = [report.logprob for report in reports]
        assert logprobs == pytest.approx(expected.logprobs, abs=tolerance)
    assert len({len(each) for each in served.values()}) > 1, "sequences join and leave"
