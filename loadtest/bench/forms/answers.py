"""Asks for answers to fifty schemas in a crowd, validates them, and asks some again alone.

Knows: the schemas, who says what is valid. Does not know: servers' insides, speeds.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from quill.loadtest.bench.forms.crowd import Heard, Server, ask, ask_all
from quill.loadtest.bench.forms.validity import Validity
from quill.loadtest.workload.forms import SCHEMAS, asked_schema
from quill.protos import generation_pb2 as pb

MAX_NEW_TOKENS = 256
TEMPERATURES = (0.0, 0.7, 1.0)  # in turns
_SHOWN = 3


@dataclass
class Verdict:
    num_asked: int = 0
    num_whole: int = 0  # ended by themselves
    num_valid: int = 0  # of these
    num_alone: int = 0
    num_equal: int = 0  # of those that were asked again
    statuses: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # the first few, for people

    def note(self, problem: str) -> None:
        self.problems += [problem] if len(self.problems) < _SHOWN else []


def schema_request(name: str, seed: int, max_new_tokens: int) -> pb.GenerateRequest:
    form = asked_schema(name)
    question = pb.Message(role="user", content=f"Give me {form.what}.")
    return pb.GenerateRequest(
        messages=pb.Conversation(messages=[question]),
        constraint=form.constraint,
        max_new_tokens=max_new_tokens,
        temperature=TEMPERATURES[seed % len(TEMPERATURES)],
        seed=seed,
    )


async def check_answers(server: Server, num_seeds: int, num_users: int, num_alone: int) -> Verdict:
    asked = [(name, seed) for seed in range(num_seeds) for name in SCHEMAS]
    requests = [schema_request(name, seed, MAX_NEW_TOKENS) for name, seed in asked]
    answers = await ask_all(server, requests, num_users)
    statuses = dict(Counter(each.status for each in answers))
    verdict = Verdict(num_asked=len(asked), statuses=statuses)
    _validate([name for name, _ in asked], answers, verdict)
    # Spread evenly: of every schema some.
    for place in range(0, len(asked), max(1, len(asked) // num_alone) if num_alone else len(asked)):
        if verdict.num_alone < num_alone:
            _compare(answers[place], await ask(server, requests[place]), asked[place], verdict)
    return verdict


def _validate(names: Sequence[str], answers: Sequence[Heard], verdict: Verdict) -> None:
    validity = {name: Validity(schema) for name, schema in SCHEMAS.items()}
    for name, heard in zip(names, answers, strict=True):
        if heard.status != "OK":
            verdict.note(f"{name}: {heard.status}: {heard.message}")
        if not heard.is_whole:
            continue
        verdict.num_whole += 1
        problem = validity[name].problem(heard.text)
        verdict.num_valid += not problem
        if problem:
            verdict.note(f"{name}: {problem}: {heard.text[:80]}")


def _compare(crowd: Heard, alone: Heard, asked: tuple[str, int], verdict: Verdict) -> None:
    verdict.num_alone += 1
    same = (crowd.token_ids, crowd.finish, crowd.status)
    if same == (alone.token_ids, alone.finish, alone.status):
        verdict.num_equal += 1
    else:
        verdict.note(f"{asked[0]}, seed {asked[1]}: other tokens alone than in the crowd")
