"""Same seed, same tokens, also of answers that keep to a form: alone and in a crowd.

On a real graph, against a plain loop in which a new matcher reads the whole answer for each token.
"""

import json
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from quill.model.data.tokenizer import byte_tokenizer
from quill.model.randomness import sequence_seed, uniform
from quill.model.reference.sampling import SamplingParameters, choose
from quill.server.constraint import Constraint
from quill.server.engine.engine import Engine
from quill.server.engine.model_runner import Chunk, OrtSession
from quill.server.grammar import constraint_source as source
from quill.server.grammar.compiler import Compiler
from quill.server.limits import Limits
from quill.server.request import Request, SamplingParams
from quill.server.tools import TOOL_CALL_FORMATS, ToolCallFormat
from tests.operators import CROWDS, SERVED
from tests.server.random_requests import restless_clock, together
from tests.server.tiny_bundle import CONTEXT, TinyBundle

VOCAB_SIZE = 512
EOS = 0
NUM_BLOCKS = CONTEXT // 16  # of one sequence
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "bcd"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["kind", "n"],
}
TOOLS = (
    source.ToolSchema("tools[0].parameters", "f", json.dumps(SCHEMA)),
    source.ToolSchema("tools[1].parameters", "g", ""),
)


def _calls(form: ToolCallFormat, may_speak: bool) -> source.Constraint:
    return source.tool_constraint(TOOLS, form, may_speak=may_speak, several=True)


FORMS = (
    *(
        source.Constraint("json_schema", json.dumps(SCHEMA)),
        source.Constraint("json_object", "true"),
    ),
    *(_calls(form, may_speak) for form in TOOL_CALL_FORMATS for may_speak in (False, True)),
    *(
        source.Constraint("regex", "[a-z ]{3,30}\\."),
        source.Constraint("choice", '["yes", "no", "nobody knows"]'),
        None,
    ),
)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    path: Path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    byte_tokenizer().save(path)
    return Compiler(path.read_text(), VOCAB_SIZE, [EOS])


def _mask(constraint: Constraint | None, answer: list[int]) -> npt.NDArray[np.bool_] | None:
    if constraint is None:
        return None
    matcher = constraint.matcher()
    for token in answer:
        matcher.accept(token)
    (mask,) = matcher.masks((), (), 0)
    bits = np.unpackbits(mask.view(np.uint8), count=VOCAB_SIZE, bitorder="little")
    return bits.astype(np.bool_)


def _alone(session: OrtSession, request: Request, sequence: int) -> list[int]:
    seed, blocks = sequence_seed(request.seed, sequence), range(NUM_BLOCKS)
    parameters = SamplingParameters(**vars(request.sampling), stop_ids=request.all_stop_ids)
    prompt, answer = list(request.prompt_ids), list[int]()
    last = len(prompt) - 1
    logits_1V, _ = session.step([Chunk(prompt, 0, blocks, [last])])
    for position in range(request.max_new_tokens):
        u, mask_V = uniform(seed, position), _mask(request.constraint, answer)
        answer.append(choose(logits_1V[0], parameters, prompt, answer, u, mask_V))
        if answer[-1] in request.all_stop_ids:
            break
        logits_1V, _ = session.step([Chunk(answer[-1:], last + len(answer), blocks, [0])])
    return answer


def _request(name: str, grammars: Compiler, rng: random.Random) -> Request:
    form = rng.choice(FORMS)
    return Request(
        request_id=name,
        prompt_ids=tuple(rng.randrange(1, 256) for _ in range(rng.randint(1, 40))),
        sampling=SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.5]),
            top_k=rng.choice([0, 0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        ),
        constraint=None if form is None else grammars.compile_now(form),
        seed=rng.getrandbits(64),
        max_new_tokens=rng.randint(5, 60),
        num_sequences=rng.choice([1, 1, 2]),
        eos_ids=frozenset({EOS}),
        logprobs=0,
    )


@pytest.mark.parametrize("precision", SERVED)
@pytest.mark.parametrize("max_num_seqs", CROWDS)
def test_crowd_gets_the_tokens_of_requests_alone(
    tiny_bundle: TinyBundle, grammars: Compiler, precision: str, max_num_seqs: int
) -> None:
    rng = random.Random(max_num_seqs)
    requests = [_request(str(number), grammars, rng) for number in range(24)]
    num_blocks = NUM_BLOCKS + 2 * max_num_seqs  # so few that some are set back
    limits = Limits(max_num_seqs=max_num_seqs, context=CONTEXT, num_blocks=num_blocks)
    session = tiny_bundle.session(precision, num_blocks)
    engine = Engine(session, limits, clock=restless_clock(rng))
    requests = [each for each in requests if engine.fits(each)]
    crowd = together(engine, requests, rng)
    plain = tiny_bundle.session(precision, NUM_BLOCKS)
    for request in requests:
        for sequence in range(request.num_sequences):
            said = [report.token_id for report in crowd[request.request_id, sequence]]
            assert said == _alone(plain, request, sequence)
