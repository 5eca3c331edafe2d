"""LiteLLM, against a real server."""

import pytest

litellm = pytest.importorskip(
    "litellm", reason="litellm isn't installed here: make test-clients has it"
)

from tests.clients.conftest import PATIENCE_S, Server  # noqa: E402

ASKED = [{"role": "user", "content": "Name a colour."}]


def options(server: Server) -> dict[str, object]:
    return {
        "model": f"openai/{server.model}",
        "api_base": server.base_url,
        "api_key": server.key,
        "timeout": PATIENCE_S,
        "max_tokens": 12,
    }


def test_completion_and_stream_say_the_same(server: Server) -> None:
    whole = litellm.completion(messages=ASKED, seed=5, **options(server))
    assert whole.usage.completion_tokens > 0
    stream = litellm.completion(messages=ASKED, seed=5, stream=True, **options(server))
    told = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert told == whole.choices[0].message.content


def test_text_completion(server: Server) -> None:
    whole = litellm.text_completion(
        prompt="Once upon a time",
        **options(server) | {"model": f"text-completion-openai/{server.model}"},
    )
    assert whole.choices[0].text


def test_embedding(embedder: Server) -> None:
    asked = options(embedder)
    del asked["max_tokens"]
    answer = litellm.embedding(input=["A cat", "A dog"], **asked)
    assert len(answer.data) == 2


def test_errors_are_its_own(server: Server) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=ASKED, **options(server) | {"api_key": "wrong"})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=ASKED, temperature=-1, **options(server))
