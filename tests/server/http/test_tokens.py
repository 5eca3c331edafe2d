"""Texts to token ids and back, in vLLM's shape."""

import pytest

from tests.server.http_client import HttpClient
from tests.server.scripted_session import END, token_of


def test_text_becomes_tokens_and_text_again(client: HttpClient) -> None:
    reply = client.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json
    assert reply == {
        "count": 3,
        "max_model_len": 200,
        "tokens": [token_of(byte) for byte in "hé".encode()],
        "token_strs": ["h", "\ufffd", "\ufffd"],
    }
    assert client.post("/detokenize", {"tokens": reply["tokens"]}).json == {"prompt": "hé"}


def test_conversation_is_what_its_template_makes_of_it(client: HttpClient) -> None:
    reply = client.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json
    assert client.post("/detokenize", {"tokens": reply["tokens"]}).json == {
        "prompt": "u:a<|endoftext|>k"
    }
    assert END in reply["tokens"]


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"prompt": 5}])
def test_tokenize_wants_one_of_both(client: HttpClient, body: dict[str, object]) -> None:
    reply = client.post("/tokenize", body)
    assert (reply.status, reply.error["param"]) == (400, "prompt")


def test_detokenize_names_its_field(client: HttpClient) -> None:
    for tokens in ([999], "abc", None):
        reply = client.post("/detokenize", {"tokens": tokens})
        assert (reply.status, reply.error["param"]) == (400, "tokens")
