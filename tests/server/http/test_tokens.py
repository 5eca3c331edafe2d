"""Texts to token ids and back, in vLLM's shape."""

from pathlib import Path

import pytest

from quill.server.auth.key_file import add_key
from tests.server.http_client import HttpClient
from tests.server.running import running_server
from tests.server.scripted_session import END, token_of

LONG = "x" * 40


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


@pytest.mark.parametrize(
    "body", [{"prompt": LONG}, {"messages": [{"role": "user", "content": LONG}]}]
)
def test_tokens_count_as_those_of_prompts(tmp_path: Path, body: dict[str, object]) -> None:
    secret = add_key(tmp_path / "keys.json", "limited", tokens_per_minute=120)  # 20 at once
    with running_server(http_port=0, api_keys=tmp_path / "keys.json") as running:
        client = HttpClient(running.http_port, {"authorization": f"Bearer {secret}"})
        assert client.post("/tokenize", body).status == 200
        for path, more in (("/tokenize", body), ("/detokenize", {"tokens": [5]})):
            reply = client.post(path, more)
            assert (reply.status, "120 tokens a minute" in reply.error["message"]) == (429, True)


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"prompt": 5}])
def test_tokenize_wants_one_of_both(client: HttpClient, body: dict[str, object]) -> None:
    reply = client.post("/tokenize", body)
    assert (reply.status, reply.error["param"]) == (400, "prompt")


def test_detokenize_names_its_field(client: HttpClient) -> None:
    for tokens in ([999], "abc", None):
        reply = client.post("/detokenize", {"tokens": tokens})
        assert (reply.status, reply.error["param"]) == (400, "tokens")
