"""lm-eval's requests, exactly as its `local-completions` (0.4.13) sends them, and what it reads.

Its loglikelihoods must be those of `Score`. lm-eval itself brings torch and datasets, so its three
functions that matter are written out here.
"""

import json
from typing import Any

import pytest

pytest.importorskip("openai", reason="the clients aren't installed here: make test-clients")

from tests.clients.conftest import Server

PAIRS = [
    ("The capital of France is", " Paris"),
    ("Question: what is 2 + 2?\nAnswer:", " 4"),
    ("The sky is", " green and made of cheese"),
    ("Café, naïve,", " 日本語 🙂"),
]
SCORE = """
import json, sys
from quill.client import Access, Client
address, key, texts = sys.argv[1:]
with Client(address, access=Access(api_key=key, insecure=True)) as client:
    scores = [client.score(ids).tokens for ids in json.loads(texts)]
print(json.dumps([[each.logprob for each in tokens] for tokens in scores]))
"""


def tokens(server: Server, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    return list(server.ask("/tokenize", body)["tokens"])


def payload(server: Server, messages: list[list[int]]) -> dict[str, Any]:
    """LocalCompletionsAPI._create_payload(generate=False)."""
    return {
        "model": server.model,
        "prompt": messages,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }


def parse(answer: Any, context_lengths: list[int]) -> list[tuple[float, bool]]:
    """LocalCompletionsAPI.parse_logprobs."""
    found = []
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice, length in zip(choices, context_lengths, strict=True):
        assert length > 0
        rated = choice["logprobs"]["token_logprobs"][length:-1]
        top = choice["logprobs"]["top_logprobs"][length:-1]
        is_greedy = all(one == max(each.values()) for one, each in zip(rated, top, strict=True))
        found.append((sum(rated), is_greedy))
    return found


def test_loglikelihoods_are_those_of_score(server: Server) -> None:
    contexts = [tokens(server, context) for context, _ in PAIRS]
    wholes = [
        context + tokens(server, rest) for context, (_, rest) in zip(contexts, PAIRS, strict=True)
    ]
    answer = server.ask("/v1/completions", payload(server, wholes))
    found = parse(answer, [len(each) for each in contexts])
    scores = json.loads(server.ours(SCORE, json.dumps(wholes)))
    for (loglikelihood, _), context, rated in zip(found, contexts, scores, strict=True):
        assert loglikelihood == sum(rated[len(context) :])
    assert found[0][1], "Paris is what the model would say itself"
    assert not found[2][1]
