"""Tools in OpenAI's shape, against models whose templates write calls in each known way."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.server.http_client import HttpClient, Reply
from tests.server.parrot import HERMES, LLAMA3, MISTRAL, Parrot, make_parrot
from tests.server.running import Running, running_server

PATH = "/v1/chat/completions"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9, "description": 'a "city" {'},
        "unit": {"enum": ["c", "f"]},
    },
    "required": ["city", "unit"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now", "description": "the time"}},
]
CALL = '{"name": "weather", "arguments": {"city": "Paris {\\"}", "unit": "f"}}'
ARGUMENTS = '{"city": "Paris {\\"}", "unit": "f"}'
NOW = '{"name": "now", "arguments": {}}'


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


@pytest.fixture(scope="module")
def hermes() -> Iterator[Running]:
    with running_server(served=make_parrot(), session=Parrot(), http_port=0) as server:
        yield server


@pytest.fixture
def client(hermes: Running) -> HttpClient:
    return HttpClient(hermes.http_port)


def ask(client: HttpClient, words: str, **options: Any) -> Reply:
    messages = [{"role": "user", "content": f"say {words}"}]
    return client.post(PATH, {"messages": messages, "tools": TOOLS, "seed": 7, **options})


def choice(client: HttpClient, words: str, **options: Any) -> Any:
    reply = ask(client, words, **options)
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]


def calls_of(message: Any) -> list[tuple[str, str]]:
    functions = [each["function"] for each in message.get("tool_calls", ())]
    return [(each["name"], each["arguments"]) for each in functions]


def streamed(reply: Reply) -> list[Any]:
    """Choices as whole answers, put together as clients do it."""
    choices: dict[int, Any] = {}
    for event in reply.events:
        for each in event["choices"]:
            message = choices.setdefault(each["index"], {"message": {"content": ""}})
            _add(message["message"], each["delta"])
            message["finish_reason"] = each["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def _add(message: Any, delta: Any) -> None:
    message["content"] += delta.get("content", "")
    for piece in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            assert piece["function"]["arguments"] == ""
            assert piece["type"] == "function"
            calls.append(piece)
        else:
            assert set(piece) == {"index", "function"}
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


def test_model_speaks_and_then_calls(client: HttpClient) -> None:
    said = choice(client, f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>")
    assert said["message"]["content"] == "Let me look.\n"
    assert calls_of(said["message"]) == [("weather", ARGUMENTS)]
    assert said["message"]["tool_calls"][0]["type"] == "function"
    assert said["finish_reason"] == "tool_calls"


def test_model_may_only_speak(client: HttpClient) -> None:
    said = choice(client, "I <tool_ know {it}.")
    assert said["message"]["content"] == "I <tool_ know {it}."
    assert "tool_calls" not in said["message"]
    assert said["finish_reason"] == "stop"


def test_several_calls_unless_they_are_unwanted(client: HttpClient) -> None:
    words = f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>"
    both = choice(client, words)
    assert calls_of(both["message"]) == [("weather", ARGUMENTS), ("now", "{}")]
    ids = [each["id"] for each in both["message"]["tool_calls"]]
    assert len(set(ids)) == 2
    assert both["message"]["content"] is None
    for options in ({"parallel_tool_calls": False}, {"tool_choice": named("weather")}):
        assert len(calls_of(choice(client, words, **options)["message"])) == 1


@pytest.mark.parametrize("words", ["<tool_call>[1]", '<tool_call>\n{"name": "rm"', "hello"])
def test_calls_are_valid_whatever_the_model_would_rather_say(
    client: HttpClient, words: str
) -> None:
    said = choice(client, words, tool_choice="required")
    schemas = {"weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
    for name, arguments in calls_of(said["message"]):
        jsonschema.validate(json.loads(arguments), schemas[name])
    assert calls_of(said["message"])
    assert said["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "chosen",
    [
        named("now"),
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("now")]}},
    ],
)
def test_named_tool_is_called(client: HttpClient, chosen: Any) -> None:
    said = choice(client, CALL, tool_choice=chosen)
    assert calls_of(said["message"]) == [("now", "{}")]


def test_none_is_text_whatever_it_looks_like(client: HttpClient) -> None:
    words = f"<tool_call>\n{NOW}\n</tool_call>"
    said = choice(client, words, tool_choice="none")
    assert (said["message"]["content"], said["finish_reason"]) == (words, "stop")


def test_stream_says_the_same(client: HttpClient) -> None:
    words = f"Well, <\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>"
    whole = ask(client, words, n=2).json["choices"]
    told = streamed(ask(client, words, n=2, stream=True))
    for one, other in zip(whole, told, strict=True):
        assert one["message"]["content"] == other["message"]["content"] == "Well, <\n"
        assert calls_of(one["message"]) == calls_of(other["message"])
        ids = [[each["id"] for each in some["message"]["tool_calls"]] for some in (one, other)]
        assert ids[0] == ids[1]
        assert other["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_what_cut_an_answer_isnt_hidden_by_its_calls(client: HttpClient, stream: bool) -> None:
    words = f"<tool_call>\n{CALL}\n</tool_call>"
    whole = "<tool_call>\n" + CALL
    for end in range(len("<tool_call>\n{"), len(whole), 7):
        reply = ask(client, words, max_tokens=end, stream=stream)
        said = streamed(reply)[0] if stream else reply.json["choices"][0]
        assert said["finish_reason"] == "length"
        for name, arguments in calls_of(said["message"]):
            assert (name, arguments) == ("weather", whole[:end].partition('"arguments": ')[2])
    reply = ask(client, words, stop="Par", stream=stream)
    said = streamed(reply)[0] if stream else reply.json["choices"][0]
    assert said["finish_reason"] == "stop"
    assert calls_of(said["message"]) == [("weather", '{"city": "')]


def test_logprobs_and_token_ids_are_of_the_whole_answer(client: HttpClient) -> None:
    words = f"Hm.\n<tool_call>\n{NOW}\n</tool_call>"
    options = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    whole = choice(client, words, **options)
    text = b"".join(bytes(each["bytes"]) for each in whole["logprobs"]["content"])
    assert text == words.encode() + b"<|endoftext|>"
    events = ask(client, words, stream=True, **options).events
    choices = [each["choices"][0] for each in events]
    told = [token for each in choices for token in (each["logprobs"] or {}).get("content", ())]
    assert told == whole["logprobs"]["content"]
    ids = [token for each in choices for token in each.get("token_ids", ())]
    assert ids == whole["token_ids"]


def test_conversation_goes_on_with_what_came_of_a_call(client: HttpClient) -> None:
    asked = {"role": "user", "content": f"say <tool_call>\n{CALL}\n</tool_call>"}
    first = choice(client, asked["content"].removeprefix("say "))["message"]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "say 21°"}
    body = {"messages": [asked, first, result], "tools": TOOLS}
    said = client.post(PATH, body).json["choices"][0]
    assert (said["message"]["content"], said["finish_reason"]) == ("21°", "stop")
    tokens = client.post("/tokenize", body).json["tokens"]
    shown = client.post("/detokenize", {"tokens": tokens}).json["prompt"]
    assert shown.startswith(">tools:")
    assert f">assistant:<tool_call>\n{CALL}\n</tool_call>>tool:say 21°" in shown


def test_tools_of_a_text_arent_counted(client: HttpClient) -> None:
    reply = client.post("/tokenize", {"prompt": "x", "tools": TOOLS})
    assert (reply.status, reply.error["param"]) == (400, "tools")


def test_template_sees_tools_as_they_were_written(client: HttpClient) -> None:
    num_bare = ask(client, "x", tools=None).json["usage"]["prompt_tokens"]
    num_shown = ask(client, "x").json["usage"]["prompt_tokens"]
    shown = ">tools:" + "".join(
        json.dumps({"type": "function", "function": each})
        for each in (
            {"name": "weather", "description": "", "parameters": WEATHER},
            {
                "name": "now",
                "description": "the time",
                "parameters": {"type": "object", "properties": {}},
            },
        )
    )
    assert num_shown - num_bare == len(shown.encode())


@pytest.mark.parametrize(
    ("template", "open", "close"), [(LLAMA3, "", ""), (MISTRAL, "[TOOL_CALLS] [", "]")]
)
def test_other_forms(template: str, open: str, close: str) -> None:
    call = CALL.replace("arguments", "parameters") if template == LLAMA3 else CALL
    with running_server(served=make_parrot(template), session=Parrot(), http_port=0) as server:
        client = HttpClient(server.http_port)
        for chosen in ("auto", "required"):
            said = choice(client, f"{open}{call}{close}", tool_choice=chosen)
            assert calls_of(said["message"]) == [("weather", ARGUMENTS)]
            assert said["finish_reason"] == "tool_calls"
        said = choice(client, "Nothing {is} called [TOOL].")
        assert said["message"]["content"] == "Nothing {is} called [TOOL]."
        facts = client.get("/model").json
        assert facts["tool_call_format"] == ("llama3" if template == LLAMA3 else "mistral")


def test_template_that_writes_calls_in_another_way() -> None:
    template = HERMES.replace("<tool_call>", "<call>")
    with running_server(served=make_parrot(template), session=Parrot(), http_port=0) as server:
        client = HttpClient(server.http_port)
        error = ask(client, "x").error
        assert error["param"] == "tool_choice"
        assert "in a way that isn't known here" in error["message"]
        said = choice(client, NOW, tool_choice="required")
        assert calls_of(said["message"]) == [("now", "{}")]
        assert client.get("/model").json["tool_call_format"] == ""


def function(**changes: Any) -> Any:
    return [{"type": "function", "function": {"name": "f", **changes}}]


SECRET = "hush"  # what clients wrote is never in the log
BAD: list[tuple[str, Any]] = [
    ("tools", {"tools": {}}),
    ("tools[0]", {"tools": ["x"]}),
    ("tools[0].type", {"tools": [{"type": "custom", "custom": {}}]}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tools[0].function.name", {"tools": function(name=None)}),
    ("tools[0].function.name", {"tools": function(name=f"{SECRET} f")}),
    ("tools[0].function.name", {"tools": function(name="f" * 65)}),
    ("tools[1].function.name", {"tools": function() * 2}),
    ("tools[0].function.description", {"tools": function(description=[1])}),
    ("tools[0].function.strict", {"tools": function(strict=1)}),
    ("tools[0].function.parameters", {"tools": function(parameters=SECRET)}),
    ("tools[0].function.parameters", {"tools": function(parameters={"type": "array"})}),
    (
        "tools[0].function.parameters",
        {"tools": function(parameters={"properties": {SECRET: {"not": {}}}})},
    ),
    (
        "tools[0].function.parameters",
        {"tools": function(parameters={"properties": {"a": False}, "required": ["a"]})},
    ),
    ("tools", {"tools": function(parameters={"x": SECRET * 20_000})}),
    ("tools", {"tools": function() * 129}),
    ("tool_choice", {"tool_choice": SECRET}),
    ("tool_choice", {"tool_choice": 1}),
    ("tool_choice", {"tool_choice": named(SECRET)}),
    ("tool_choice.type", {"tool_choice": {"type": "custom"}}),
    (
        "tool_choice.allowed_tools.mode",
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
    ),
    ("tool_choice", {"tools": [], "tool_choice": "required"}),
    ("tools", {"tool_choice": "required", "num_beams": 2}),
    ("ignore_eos", {"ignore_eos": True}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("parallel_tool_calls", {"parallel_tool_calls": "no"}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("function_call", {"function_call": "auto"}),
]


@pytest.mark.parametrize(("param", "options"), BAD)
def test_bad_tools_are_rejected_by_the_names_that_were_written(
    client: HttpClient,
    hermes: Running,
    param: str,
    options: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reply = ask(client, "x", **options)
    assert (reply.status, reply.error["param"]) == (400, param)
    hermes.next_record("INVALID_ARGUMENT")
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("tool_calls[0]", 5),
        ("tool_calls[0].function", {"type": "function"}),
        ("tool_calls[0].function.name", {"function": {"name": "a b", "arguments": "{}"}}),
        ("tool_calls[0].function.arguments", {"function": {"name": "f", "arguments": {}}}),
        ("tool_calls[0].function.arguments", {"function": {"name": "f", "arguments": "[]"}}),
        ("tool_calls[0].function.arguments", {"function": {"name": "f", "arguments": SECRET}}),
        ("tool_calls[0].function.arguments", {"function": {"name": "f", "arguments": "[" * 9999}}),
        ("tool_calls[0].id", {"id": 5, "function": {"name": "f", "arguments": "{}"}}),
    ],
)
def test_bad_calls_in_a_conversation_are_rejected(
    client: HttpClient, field: str, call: Any
) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    reply = client.post(PATH, {"messages": messages})
    assert (reply.status, reply.error["param"]) == (400, f"messages[0].{field}")
    assert SECRET not in reply.error["message"]
