"""Chats in OpenAI's shape: a session that recites, real sockets."""

from typing import Any

import pytest

from quill.server.client.sync_client import Client
from tests.server.http_client import HttpClient, Reply
from tests.server.process import NEVER
from tests.server.running import Running
from tests.server.scripted_session import TIMEOUT_S, token_of

PATH = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "hello"}]
ANSWER = "lmnopq"  # the template ends with a k


def chat(client: HttpClient, messages: Any = ASKED, **options: Any) -> Reply:
    return client.post(PATH, {"messages": messages, "max_tokens": 6, **options})


def error_of(client: HttpClient, **options: Any) -> Any:
    reply = chat(client, **options)
    assert reply.status == 400, reply.body
    assert reply.error["type"] == "invalid_request_error"
    return reply.error


def test_answer_has_openais_shape_and_the_seed(client: HttpClient) -> None:
    reply = chat(client, seed=5, model="reciter")
    whole = reply.json
    assert reply.headers["x-request-id"] == whole["id"].removeprefix("chatcmpl-")
    assert (whole["object"], whole["model"], whole["seed"]) == ("chat.completion", "reciter", 5)
    assert whole["system_fingerprint"] == "reciter-e3b0c442-fp32"  # SHA-256 of no files
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = whole["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    assert 0 < whole["timings"]["first_token_ms"] <= whole["timings"]["total_ms"]


def test_stream_says_what_the_answer_says(client: HttpClient) -> None:
    assert all("usage" not in each for each in chat(client, stream=True).events)
    reply = chat(client, stream=True, n=2, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.body.endswith(b"data: [DONE]\n\n")
    *chunks, last = reply.events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk["usage"] is None for chunk in chunks)
    for index in range(2):
        own = [each["choices"][0] for each in chunks if each["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(each["delta"].get("content", "") for each in own) == ANSWER
        reasons = [each["finish_reason"] for each in own]
        assert reasons == [None] * (len(own) - 1) + ["length"]
        assert own[-1]["delta"] == {}


def test_same_seed_gives_the_tokens_of_grpc(running: Running, client: HttpClient) -> None:
    whole = chat(client, return_token_ids=True, temperature=3.0, seed=11).json
    streamed = chat(client, return_token_ids=True, temperature=3.0, seed=11, stream=True)
    with Client(running.address, NEVER) as grpc_client:
        prompt = list(whole["prompt_token_ids"])
        answer = grpc_client.generate(
            prompt, max_new_tokens=6, temperature=3.0, seed=11, timeout_s=TIMEOUT_S
        )
    expected, chunks = list(answer.sequences[0].token_ids), streamed.events
    assert whole["choices"][0]["token_ids"] == expected
    told = [token for each in chunks for token in each["choices"][0].get("token_ids", ())]
    assert told == expected
    assert chunks[0]["prompt_token_ids"] == prompt


def test_picked_seed_gives_the_answer_again(client: HttpClient) -> None:
    first = chat(client, temperature=5.0).json
    again = chat(client, temperature=5.0, seed=first["seed"]).json
    assert first["seed"] < 2**53
    assert again["choices"] == first["choices"]


def test_logprobs_have_true_bytes(client: HttpClient) -> None:
    reply = chat(client, [{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2)
    content = reply.json["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == list(ANSWER)
    assert [each["bytes"] for each in content] == [[ord(letter)] for letter in ANSWER]
    assert all(len(each["top_logprobs"]) == 2 for each in content)
    assert all(each["top_logprobs"][0]["logprob"] == each["logprob"] <= 0 for each in content)


def test_half_characters_differ_by_their_bytes(client: HttpClient) -> None:
    bias = {str(token_of(0xC3)): 100}
    reply = chat(client, logprobs=True, logit_bias=bias, max_tokens=1)
    (token,) = reply.json["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("\ufffd", [0xC3])


@pytest.mark.parametrize(
    "content",
    ["hello", [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]],
)
def test_content_may_come_in_parts(client: HttpClient, content: Any) -> None:
    reply = client.post("/tokenize", {"messages": [{"role": "user", "content": content}]})
    expected = client.post("/tokenize", {"messages": ASKED}).json["tokens"]
    assert reply.json["tokens"] == expected


def test_developer_is_system_and_null_is_nothing_said(client: HttpClient) -> None:
    given = [{"role": "developer", "content": "be"}, {"role": "assistant", "content": None}, *ASKED]
    plain = [{"role": "system", "content": "be"}, {"role": "assistant", "content": ""}, *ASKED]
    replies = [client.post("/tokenize", {"messages": each}) for each in (given, plain)]
    assert replies[0].json == replies[1].json


@pytest.mark.parametrize("role", ["tool", "function"])
def test_template_decides_what_a_tool_said(client: HttpClient, role: str) -> None:
    given = [*ASKED, {"role": role, "tool_call_id": "1", "content": "4"}]
    tokens = client.post("/tokenize", {"messages": given}).json["tokens"]
    said = client.post("/detokenize", {"tokens": tokens}).json["prompt"]
    assert said == "u:hello<|endoftext|>t:4<|endoftext|>k"


def test_null_is_unset_and_unknown_fields_are_ignored(client: HttpClient) -> None:
    names = ("temperature", "stop", "tools", "tool_choice", "logprobs", "seed", "n", "user")
    options: dict[str, Any] = dict.fromkeys(names)
    reply = chat(client, **options, store=True, brand_new_field={"a": [1]})
    assert reply.json["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
    ],
)
def test_values_that_ask_for_nothing_are_fine(client: HttpClient, name: str, value: Any) -> None:
    assert chat(client, **{name: value}).status == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_completion_tokens", 10**6),
        ("temperature", "hot"),
        ("temperature", True),
        ("n", 1.5),
        ("seed", 2**64),
        ("stop", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"１２": 1}),
        ("top_logprobs", 2),
        ("stream_options.include_usage", {"include_usage": 1}),
        ("early_stopping", "often"),
        ("messages", "hello"),
        ("messages", []),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("use_beam_search", True),
    ],
)
def test_bad_values_are_rejected_by_name(client: HttpClient, name: str, value: Any) -> None:
    assert error_of(client, **{name.partition(".")[0]: value})["param"] == name


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "wizard", "content": "secret words"}, "messages"),
        ({"role": 5, "content": "secret words"}, "messages[0].role"),
        ({"content": "secret words"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content"),
        ({"role": "user", "content": ["secret words"]}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
    ],
)
def test_bad_messages_are_rejected_without_quoting_them(
    client: HttpClient, message: Any, field: str
) -> None:
    error = error_of(client, messages=[message])
    assert error["param"] == field
    assert "secret" not in error["message"]


def test_served_model_is_also_quill_and_no_other_is_served(client: HttpClient) -> None:
    assert chat(client, model="quill").json["model"] == "reciter"
    reply = chat(client, model="gpt-5")
    assert (reply.status, reply.error["param"]) == (404, "model")
    assert "there is reciter" in reply.error["message"]


def test_unset_length_goes_to_the_end_of_the_context(client: HttpClient) -> None:
    whole = client.post(PATH, {"messages": ASKED}).json
    assert whole["usage"]["total_tokens"] == 200
    assert whole["choices"][0]["finish_reason"] == "length"


def test_options_of_vllm_are_heeded(client: HttpClient) -> None:
    stopped = chat(client, stop="op").json["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("lmn", "stop")
    by_token = chat(client, stop_token_ids=[token_of(ord("n"))]).json["choices"][0]
    assert (by_token["message"]["content"], by_token["finish_reason"]) == ("lm", "stop")
    later = chat(client, stop_token_ids=[token_of(ord("l"))], min_tokens=3).json
    assert later["usage"]["completion_tokens"] == 6
    assert chat(client, top_k=-1, min_p=0.1, repetition_penalty=1.1, priority=-3).status == 200
    found = chat(client, num_beams=2, length_penalty=0.5, early_stopping="never").json["choices"][0]
    assert found["message"]["content"] == ANSWER
    assert found["quill"]["score"] < 0


def test_prompt_logprobs_are_vllms(client: HttpClient) -> None:
    whole = chat(client, prompt_logprobs=1, return_token_ids=True).json
    first, *others = whole["prompt_logprobs"]
    assert first is None
    for token, each in zip(whole["prompt_token_ids"][1:], others, strict=True):
        assert {"logprob", "rank", "decoded_token"} == set(each[str(token)])
