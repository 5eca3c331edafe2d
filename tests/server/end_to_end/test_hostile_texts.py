"""Texts and tokenizers that would hold everybody up, or leave a call without an end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.errors import StartError
from quill.server.text.tokenizer import MAX_CHARACTERS_PER_TOKEN, Text
from tests.server.running import CONTEXT, Running, make_served, make_text, running_server

TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_server() as server:
        yield server


@pytest.fixture
def stub(running: Running) -> Iterator[pb_grpc.TextGenerationStub]:
    with grpc.insecure_channel(running.address) as channel:
        yield pb_grpc.TextGenerationStub(channel)


def test_text_that_is_far_too_long_is_refused_unread(stub: pb_grpc.TextGenerationStub) -> None:
    long = "a " * (CONTEXT * MAX_CHARACTERS_PER_TOKEN // 2 + 1)
    messages = pb.Conversation(messages=[pb.Message(role="user", content=long)])
    calls: list[tuple[Any, Any]] = [
        (stub.Tokenize, pb.TokenizeRequest(text=long)),
        (stub.Generate, pb.GenerateRequest(prompt=long)),
        (stub.Generate, pb.GenerateRequest(messages=messages)),
        (stub.Detokenize, pb.DetokenizeRequest(token_ids=[65] * (2**17 + 1))),
    ]
    for call, request in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "at most" in str(caught.value.details())


def _changed(**parts: object) -> str:
    tokenizer = json.loads(make_text()._parsing.to_str())
    return json.dumps(tokenizer | parts)


def test_tokenizer_that_panics_when_it_is_loaded_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.write_text(_changed(normalizer=normalizer))
    with pytest.raises(StartError, match="can't be read as a tokenizer"):
        Text.load(path, None)


def test_padding_and_cutting_of_a_tokenizer_are_left_out() -> None:
    padding = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    cutting = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert len(Text(_changed(padding=padding, truncation=cutting)).encode("abcde")) == 5


# On many a's in a row it gives up, and the library panics.
HOSTILE = {"Regex": "(a|aa)+b"}


def test_tokenizer_that_panics_on_a_text_ends_the_call_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    split = {"type": "Split", "pattern": HOSTILE, "behavior": "Isolated", "invert": False}
    served = make_served(text=Text(_changed(pre_tokenizer=split)))
    with running_server(served=served) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.TextGenerationStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Tokenize(pb.TokenizeRequest(text="a" * 60), timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert stub.Tokenize(pb.TokenizeRequest(text="b"), timeout=TIMEOUT_S).token_ids
    assert "the tokenizer failed" in caplog.text


def test_tokenizer_that_panics_on_an_answer_ends_the_call_and_nothing_else() -> None:
    tokenizer = json.loads(_changed(decoder={"type": "Replace", "pattern": HOSTILE, "content": ""}))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a" * 60] = hostile = vocabulary.pop("d")  # the reciter says it after abc
    served = make_served(text=Text(json.dumps(tokenizer)))
    with running_server(served=served) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.TextGenerationStub(channel)
        calls: list[tuple[Any, Any]] = [
            (stub.Detokenize, pb.DetokenizeRequest(token_ids=[hostile])),
            (stub.Generate, pb.GenerateRequest(prompt="abc")),
        ]
        for call, request in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call(request, timeout=TIMEOUT_S)
            assert caught.value.code() is grpc.StatusCode.INTERNAL
        answer = stub.Generate(pb.GenerateRequest(prompt="e", max_new_tokens=1), timeout=TIMEOUT_S)
        assert answer.sequences[0].text == "f"
