"""Requests from a caller's arguments, and the prefix that they share."""

from typing import Any

import grpc
import numpy as np
import pytest

from quill.protos import generation_pb2 as pb
from quill.server.balancing_headers import prefix_key
from quill.server.client.errors import CallError
from quill.server.client.requests import (
    embed_request,
    fill_request,
    make_request,
    score_request,
    with_seed,
)

SYSTEM = {"role": "system", "content": "You are a pirate. " * 50}


def test_prompt_is_text_tokens_or_a_conversation() -> None:
    assert make_request("hi", {}).prompt == "hi"
    assert list(make_request([1, 2], {}).prompt_ids.ids) == [1, 2]
    conversation = make_request([{"role": "user", "content": "hi"}], {"seed": 0})
    assert conversation.messages.messages[0].content == "hi"
    assert conversation.HasField("seed")
    assert not conversation.HasField("temperature")


def test_tools_and_tool_choice_may_be_plain_values() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    tools: list[Any] = [
        {"name": "f", "parameters": {"type": "object"}},
        pb.Tool(name="g"),
        {"name": "h"},
    ]
    request = make_request(messages, {"tools": tools, "tool_choice": "f"})
    assert request.messages.messages[0].tool_calls[0].name == "f"
    assert [each.parameters for each in request.tools] == ['{"type": "object"}', "", ""]
    assert request.tool_choice == pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED, names=["f"])
    for name in ("auto", "none", "required"):
        mode = make_request("x", {"tool_choice": name}).tool_choice.mode
        assert pb.ToolMode.Name(mode) == f"TOOL_MODE_{name.upper()}"


def test_messages_and_token_ids_may_be_protobuf_and_numpy() -> None:
    messages: list[Any] = [pb.Message(role="system"), {"role": "user", "content": "hi"}]
    request = make_request(messages, {})
    assert [each.role for each in request.messages.messages] == ["system", "user"]
    assert list(make_request(np.array([1, 2]), {}).prompt_ids.ids) == [1, 2]  # type: ignore[arg-type]


def test_embedding_inputs_are_one_or_several_texts_or_token_lists() -> None:
    one = embed_request("hi", {"pooling": "last", "normalize": False})
    assert [each.text for each in one.inputs] == ["hi"]
    assert (one.pooling, one.HasField("normalize")) == (pb.POOLING_LAST, True)
    several = embed_request(["hi", [1, 2]], {})
    assert [each.WhichOneof("input") for each in several.inputs] == ["text", "token_ids"]
    assert list(fill_request([1, 2], None).token_ids.ids) == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([{"role": "user", "content": "hi"}, "there"], {}),
        ([1, "x"], {}),
        ({"role": "user", "content": "hi"}, {}),
        (b"Once", {}),
        ("x", {"tools": "f"}),
        ("x", {"tools": {"name": "f"}}),
        ("x", {"tools": [{"nam": "f"}]}),
        ("x", {"seed": -1}),
        ("x", {"no_such": 1}),
        ("x", {"top_k": 2**40}),
    ],
)
def test_invalid_prompt_or_option_is_rejected_here(prompt: Any, options: Any) -> None:
    with pytest.raises(CallError, match="can't be written") as caught:
        make_request(prompt, options)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "write",
    [score_request, lambda text: fill_request(text, None), lambda text: embed_request([text], {})],
)
@pytest.mark.parametrize("text", ["\ud800", [2**40], [-1.5]])
def test_invalid_text_is_rejected_here(write: Any, text: Any) -> None:
    with pytest.raises(CallError) as caught:
        write(text)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_unknown_pooling_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(CallError, match="mean or first or last"):
        embed_request("hi", {"pooling": "middle"})


def test_request_gets_a_seed_only_if_it_has_none() -> None:
    assert with_seed(make_request("a", {"seed": 0})).seed == 0
    assert with_seed(make_request("a", {})).HasField("seed")


def key(prompt: Any) -> bytes | None:
    return prefix_key(make_request(prompt, {}))


def test_conversations_share_a_prefix_by_their_first_message() -> None:
    hi, ho = ({"role": "user", "content": text} for text in ("Hi", "Ho"))
    assert key([SYSTEM, hi]) == key([SYSTEM, ho]) == key([SYSTEM])
    assert key([{**SYSTEM, "content": SYSTEM["content"] + "."}]) != key([SYSTEM])
    assert key([{**SYSTEM, "role": "user"}]) != key([SYSTEM])
    with_tools = make_request([SYSTEM], {"tools": [{"name": "f"}]})
    assert prefix_key(with_tools) != key([SYSTEM])


def test_texts_and_tokens_share_a_prefix_by_their_first_characters_or_tokens() -> None:
    assert key("x" * 300) == key("x" * 300 + "y")
    assert key([5] * 100) == key([5] * 100 + [1])
    assert key("ab") != key("ac")
    assert key([1, 12]) != key([11, 2])
    assert key("") is None
