"""What a line of a batch asks for."""

import json

import pytest

from quill.protos import generation_pb2 as pb
from quill.server.client.tools.batch_lines import SEED_BITS, derived_seed, read_object, read_request
from quill.server.errors import InvalidFieldError


def read(line: str) -> pb.GenerateRequest | pb.EmbedRequest:
    return read_request(read_object(line.encode("utf-8", "surrogatepass")), seed=11)


def test_prompts_tokens_and_conversations_become_requests() -> None:
    assert read('{"prompt": "Once"}') == pb.GenerateRequest(prompt="Once", seed=11)
    tokens = pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=[5, 6]), seed=0)
    assert read('{"prompt": [5, 6], "seed": 0, "id": 7}') == tokens
    said = pb.Conversation(messages=[pb.Message(role="user", content="hi")])
    asked = '{"messages": [{"role": "user", "content": "hi"}], "top_k": 0, "min_p": null}'
    assert read(asked) == pb.GenerateRequest(messages=said, seed=11, top_k=0)


def test_options_are_those_of_the_wire() -> None:
    line = {
        "prompt": "Once",
        "logit_bias": {"42": -1.5},
        "early_stopping": "EARLY_STOPPING_NEVER",
        "constraint": {"choice": {"choices": ["a", "b"]}},
        "stop": ["."],
    }
    expected = pb.GenerateRequest(
        prompt="Once",
        logit_bias={42: -1.5},
        early_stopping=pb.EARLY_STOPPING_NEVER,
        constraint=pb.Constraint(choice=pb.Choice(choices=["a", "b"])),
        stop=["."],
        seed=11,
    )
    assert read(json.dumps(line)) == expected


def test_inputs_become_requests_for_vectors() -> None:
    one = pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")], pooling=pb.POOLING_LAST, dimensions=2)
    assert read('{"input": "a", "pooling": "last", "dimensions": 2}') == one
    ids = pb.EmbedInput(token_ids=pb.TokenIds(ids=[3, 4]))
    assert read('{"input": [3, 4]}') == pb.EmbedRequest(inputs=[ids])
    assert read('{"input": ["a", [3, 4]]}').inputs == [pb.EmbedInput(text="a"), ids]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("line", "field", "says"),
    [
        ("{", "line", "isn't JSON"),
        ("[" * 100_000, "line", "isn't JSON"),
        ("[1]", "line", "isn't a JSON object"),
        ("\ud800", "line", "isn't UTF-8"),
        ('{"prompt": "a", "temperature": NaN}', "line", "NaN is no number in JSON"),
        ("{}", "line", "has no input"),
        ('{"prompt": "a", "input": "b"}', "line", "has prompt and input"),
        ('{"prompt": 4}', "prompt", "must be a text, token ids, or messages"),
        ('{"prompt": [1, "a"]}', "prompt", "must be a text, token ids, or messages"),
        ('{"prompt": "\\ud800"}', "prompt", "can't be read"),
        ('{"prompt": "a", "max_tokens": 3}', "max_tokens", "isn't known; there are max_new_tokens"),
        ('{"prompt": "a", "prompt_ids": {"ids": [1]}}', "prompt_ids", "isn't known"),
        ('{"prompt": "a", "top_k": "many"}', "top_k", "can't be read"),
        ('{"prompt": "a", "top_k": 1e30}', "top_k", "can't be read"),
        ('{"prompt": "a", "stop": {"a": 1}}', "stop", "can't be read"),
        ('{"prompt": "a", "constraint": 3}', "constraint", "can't be read"),
        ('{"messages": [{"role": 3}]}', "messages", "can't be read"),
        ('{"messages": [{"who": "me"}]}', "messages", "can't be read"),
        ('{"input": []}', "input", "must be a text, token ids, or a list"),
        ('{"input": [{}]}', "input", "neither a text nor token ids"),
        ('{"input": "a", "pooling": 3}', "pooling", "mean or first or last"),
        ('{"input": "a", "seed": 3}', "seed", "isn't known; there are pooling"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_words(line: str, field: str, says: str) -> None:
    with pytest.raises(InvalidFieldError, match=f"^{field} .*{says}") as raised:
        read(line)
    assert raised.value.field == field


def test_seeds_differ_and_stay_the_same() -> None:
    seeds = {derived_seed(base, number) for base in range(10) for number in range(100)}
    assert len(seeds) == 1000
    assert max(seeds) < 2**SEED_BITS
    assert derived_seed(0, 1) == 1419406389890805
