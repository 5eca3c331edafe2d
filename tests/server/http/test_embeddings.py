"""Embeddings in OpenAI's shape."""

import base64
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.http_client import HttpClient, Reply
from tests.server.running import make_embedder, running_server
from tests.server.scripted_session import hidden_of, token_of

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def client() -> Iterator[HttpClient]:
    with running_server(http_port=0, served=make_embedder()) as running:
        yield HttpClient(running.http_port)


def embed(client: HttpClient, given: Any, **options: Any) -> Reply:
    return client.post(PATH, {"input": given, **options})


@pytest.mark.parametrize("given", ["a", ["a"], [token_of(ord("a"))], [[token_of(ord("a"))]]])
def test_text_and_token_ids_are_the_same(client: HttpClient, given: Any) -> None:
    whole = embed(client, given, user="me").json
    expected = hidden_of(token_of(ord("a")))
    assert whole["data"] == [{"object": "embedding", "index": 0, "embedding": expected}]
    assert (whole["object"], whole["model"]) == ("list", "reciter")
    assert whole["usage"] == {"prompt_tokens": 1, "total_tokens": 1}


def test_base64_is_what_openais_clients_ask_for(client: HttpClient) -> None:
    plain = embed(client, ["a", "bc"]).json["data"]
    packed = embed(client, ["a", "bc"], encoding_format="base64").json["data"]
    for numbers, text in zip(plain, packed, strict=True):
        raw = base64.b64decode(text["embedding"])
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == numbers["embedding"]


def test_dimensions_cut(client: HttpClient) -> None:
    assert len(embed(client, "a", dimensions=2).json["data"][0]["embedding"]) == 2


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], [999]]}, "input[1]"),
        ({"input": []}, "input"),
        ({"dimensions": 99}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_bad_values_are_refused_by_name(
    client: HttpClient, options: dict[str, Any], param: str
) -> None:
    reply = client.post(PATH, {"input": "a", **options})
    assert (reply.status, reply.error["param"]) == (400, param)


def test_model_without_vectors_says_so() -> None:
    with running_server(http_port=0) as running:
        reply = embed(HttpClient(running.http_port), "a")
        assert (reply.status, reply.error["code"]) == (400, "failed_precondition")
