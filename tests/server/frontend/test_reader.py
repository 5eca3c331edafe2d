"""A request's rules: what is accepted, and which field an error names."""

import json
from typing import Any

import pytest

from quill.protos import generation_pb2 as pb
from quill.server.api import messages
from quill.server.errors import InvalidFieldError, StartError, UnsupportedError
from quill.server.frontend.reader import Arrival, RequestReader
from quill.server.frontend.served_model import ServedModel
from quill.server.frontend.spec import ParsedRequest
from tests.server.running import CONTEXT, make_manifest, make_served, make_text

ARRIVAL = Arrival(request_id="r", deadline_s=None)
SERVED = make_served()


def read(**fields: Any) -> ParsedRequest:
    return read_by(SERVED, pb.GenerateRequest(**{"prompt": "abc", **fields}))


def read_by(served: ServedModel, message: pb.GenerateRequest) -> ParsedRequest:
    return RequestReader(served).read_generate(messages.read_generate(message), ARRIVAL)


def read_score(message: pb.ScoreRequest) -> ParsedRequest:
    return RequestReader(SERVED).read_score(messages.read_score(message), ARRIVAL)


def conversation(*messages: tuple[str, str]) -> pb.Conversation:
    return pb.Conversation(messages=[pb.Message(role=r, content=c) for r, c in messages])


def ids(*values: int) -> pb.TokenIds:
    return pb.TokenIds(ids=values)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": "x" * CONTEXT}),
    ("prompt", {"prompt": "x" * 500_000}),
    ("prompt_ids", {"prompt": None, "prompt_ids": ids()}),
    ("prompt_ids", {"prompt": None, "prompt_ids": ids(1, 257)}),
    ("prompt_ids", {"prompt": None, "prompt_ids": ids(-1)}),
    ("prompt_ids", {"prompt": None, "prompt_ids": ids(*[1] * CONTEXT)}),
    ("messages", {"prompt": None, "messages": conversation()}),
    ("messages", {"prompt": None, "messages": conversation(("robot", "hi"))}),
    ("messages", {"prompt": None, "messages": conversation(("user", "x" * CONTEXT))}),
    ("messages", {"prompt": None, "messages": conversation(*[("user", "")] * 1025)}),
    ("input", {"prompt": None}),
    ("constraint", {"constraint": pb.Constraint()}),
    ("constraint", {"constraint": pb.Constraint(regex="a"), "num_beams": 2}),
    ("ignore_eos", {"constraint": pb.Constraint(regex="a"), "ignore_eos": True}),
    ("constraint.json_object", {"constraint": pb.Constraint(json_object=False)}),
    ("constraint.regex", {"constraint": pb.Constraint(regex="")}),
    ("constraint.json_schema", {"constraint": pb.Constraint(json_schema="x" * 70_000)}),
    *(
        ("constraint.choice", {"constraint": pb.Constraint(choice=pb.Choice(choices=choices))})
        for choices in ([], [""], ["x"] * 1025)
    ),
]


@pytest.mark.parametrize(("field", "fields"), BAD, ids=lambda value: str(value)[:60])
def test_what_breaks_a_rule_is_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read(**fields)
    assert caught.value.field == field


def test_constraints_are_read_and_only_where_the_model_can_follow_them() -> None:
    constraint = pb.Constraint(choice=pb.Choice(choices=["a", 'é"']))
    constraint_ = read(constraint=constraint).request.constraint
    assert constraint_ is not None
    assert (constraint_.kind, json.loads(constraint_.text)) == ("choice", ["a", 'é"'])
    message = pb.GenerateRequest(prompt_ids=ids(1), constraint=constraint)
    with pytest.raises(UnsupportedError):
        read_by(make_served(grammars=None), message)


def test_defaults_are_the_models_own_then_off() -> None:
    asked = read()
    assert asked.request.sampling.temperature == 0.0  # the manifest's
    assert asked.request.sampling.top_p == 1.0
    assert asked.request.max_new_tokens == min(256, CONTEXT)
    assert asked.request.eos_ids == {0}
    assert read(temperature=0.5).request.sampling.temperature == 0.5


def test_zero_is_a_seed_and_none_gets_one_of_its_own() -> None:
    assert read(seed=0).request.seed == 0
    assert read(seed=2**64 - 1).request.seed == 2**64 - 1
    assert len({read().request.seed for _ in range(8)}) == 8


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    assert read(top_k=257).request.sampling.top_k == 0
    assert read(top_k=256).request.sampling.top_k == 256


def test_ignore_eos_leaves_the_clients_own_stop_tokens() -> None:
    request = read(ignore_eos=True, stop_token_ids=[7]).request
    assert not request.eos_ids
    assert request.stop_ids == {7}


def test_messages_are_rendered_and_the_prompts_ids_taken_as_they_are() -> None:
    spoken = read(prompt=None, messages=conversation(("user", "hi"))).request.prompt_ids
    assert make_text().decode(spoken, skip_special=False) == "u:hi<|endoftext|>k"
    assert spoken[-2] == 0
    assert read(prompt=None, prompt_ids=ids(5, 0)).request.prompt_ids == (5, 0)


def test_echoed_tokens_have_logprobs_too() -> None:
    assert read(echo=True, logprobs=3, prompt_logprobs=1).request.prompt_logprobs == 3
    assert read(logprobs=3).request.prompt_logprobs is None


def test_what_the_model_lacks_is_no_fault_of_the_field() -> None:
    message = pb.GenerateRequest(messages=conversation(("user", "hi")))
    with pytest.raises(UnsupportedError, match="no chat template"):
        read_by(make_served(template=None), message)
    with pytest.raises(UnsupportedError, match="no tokenizer"):
        read_by(make_served(text=None), pb.GenerateRequest(prompt="a"))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("input", pb.ScoreRequest()),
        ("text", pb.ScoreRequest(text="a")),
        ("text", pb.ScoreRequest(text="a" * (CONTEXT + 1))),
        ("token_ids", pb.ScoreRequest(token_ids=ids(1, 300))),
        ("priority", pb.ScoreRequest(text="ab", priority=11)),
    ],
)
def test_scores_have_rules_too(field: str, message: pb.ScoreRequest) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read_score(message)
    assert caught.value.field == field


def test_whole_context_can_be_scored() -> None:
    request = read_score(pb.ScoreRequest(text="a" * CONTEXT)).request
    assert (len(request.prompt_ids), request.max_new_tokens) == (CONTEXT, 0)


def test_bundle_whose_own_defaults_break_a_rule_is_not_served() -> None:
    with pytest.raises(StartError, match="top_p is 2"):
        make_served(manifest=make_manifest(generation={"top_p": 2.0}))
