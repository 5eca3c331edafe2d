"""What messages may say of tools, what a template is shown, and what is told of calls."""

import json
from dataclasses import replace
from typing import Any

import pytest

from quill.model.data.tokenizer import byte_tokenizer
from quill.protos import generation_pb2 as pb
from quill.server.api.messages import model_message, read_generate, response_message
from quill.server.errors import InvalidFieldError, UnsupportedError
from quill.server.frontend.answer import Answer, merge
from quill.server.frontend.reader import Arrival, RequestReader
from quill.server.frontend.served_model import ServedModel
from quill.server.frontend.spec import ParsedRequest
from quill.server.grammar.compiler import Compiler
from quill.server.outputs import FailEvent, FinishEvent, Timings, TokenEvent, Usage
from quill.server.request import Constraint
from quill.server.text.chat_template import ChatTemplate
from quill.server.text.tokenizer import Text
from quill.server.tools import merge_deltas
from tests.server.parrot import CONTEXT, HERMES, MISTRAL, make_parrot
from tests.server.running import TEMPLATE, make_served

ARRIVAL = Arrival(request_id="r", deadline_s=None)
AUTO, NONE, REQUIRED = pb.TOOL_MODE_AUTO, pb.TOOL_MODE_NONE, pb.TOOL_MODE_REQUIRED
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    pb.Tool(name="weather", description="<|endoftext|>", parameters=json.dumps(SCHEMA)),
    pb.Tool(name="now"),
]
HI = pb.Message(role="user", content="hi")
CALLED = pb.Message(
    role="assistant",
    content="Hm.",
    tool_calls=[pb.ToolCall(id="123456789", name="now", arguments='{"a": "<|endoftext|>"}')],
)
DONE = pb.Message(role="tool", content="noon", tool_call_id="123456789", name="now")
PARROT = make_parrot()


def plain() -> ServedModel:
    """Its template knows no tools."""
    served = make_served()
    return replace(served, limits=replace(served.limits, context=CONTEXT))


def read(
    served: ServedModel, messages: tuple[pb.Message, ...] = (HI,), **fields: Any
) -> ParsedRequest:
    conversation = pb.Conversation(messages=messages)
    message = pb.GenerateRequest(messages=conversation, **{"tools": TOOLS, "seed": 7, **fields})
    return RequestReader(served).read_generate(read_generate(message), ARRIVAL)


def choice(mode: pb.ToolMode, *names: str) -> pb.ToolChoice:
    return pb.ToolChoice(mode=mode, names=names)


def shown(parsed: ParsedRequest) -> str:
    return Text(byte_tokenizer()._json).decode(parsed.request.prompt_ids, skip_special=False)


def test_template_that_knows_none_is_given_a_list() -> None:
    said = shown(read(plain(), tool_choice=choice(REQUIRED)))
    weather = {"name": "weather", "description": "<|endoftext|>", "parameters": SCHEMA}
    assert said.startswith("s:You can call these tools:\n")
    assert json.dumps(weather) in said
    assert said.endswith("<|endoftext|>u:hi<|endoftext|>k")
    system = pb.Message(role="system", content="Be brief.")
    asked = shown(read(plain(), (system, HI), tool_choice=choice(REQUIRED)))
    assert asked.startswith("s:Be brief.\n\nYou can call these tools:\n")
    assert shown(read(plain(), tool_choice=choice(NONE))) == "u:hi<|endoftext|>k"
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    )
    strict = replace(plain(), template=ChatTemplate(source, {}))
    said = shown(read(strict, tool_choice=choice(REQUIRED)))
    assert said.startswith("u:You can call these tools:\n")
    assert said.endswith("\n\nhi<|endoftext|>k")


def test_what_people_write_in_tools_and_calls_ends_nothing() -> None:
    parsed = read(PARROT, (HI, CALLED, DONE))
    assert "<|endoftext|>" in shown(parsed)
    assert 0 not in parsed.request.prompt_ids


def test_template_that_writes_no_calls_is_given_them_as_text() -> None:
    said = shown(read(plain(), (HI, CALLED, DONE), tool_choice=choice(NONE)))
    call = '{"name": "now", "arguments": {"a": "<|endoftext|>"}}'
    assert f"a:Hm.\n{call}<|endoftext|>t:noon<|endoftext|>k" in said


def test_templates_are_given_ids_and_names() -> None:
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools }}"
    served = replace(PARROT, template=ChatTemplate(template, {}))
    said = shown(read(served, (HI, CALLED, DONE), tool_choice=choice(NONE)))
    assert '"tool_call_id": "123456789", "name": "now"' in said
    assert '"id": "123456789"' in said
    bad = pb.Message(role="assistant", tool_calls=[pb.ToolCall(id="1", name="now")])
    with pytest.raises(InvalidFieldError, match="ids have nine characters"):
        read(make_parrot(MISTRAL), (HI, bad))


BAD: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"messages": None, "prompt": "hi"}),
    ("tools", {"tools": TOOLS * 65}),
    ("tools", {"tools": [pb.Tool(name="f", parameters='{"x": "%s"}' % ("é" * 2**15))]}),
    ("tools", {"tools": [pb.Tool(name="f", description="x" * 100_000)]}),
    ("tools[0].name", {"tools": [pb.Tool(name="")]}),
    ("tools[0].name", {"tools": [pb.Tool(name="a.b")]}),
    ("tools[0].name", {"tools": [pb.Tool(name="ü")]}),
    ("tools[1].name", {"tools": [TOOLS[0], TOOLS[0]]}),
    ("tools[1].parameters", {"tools": [TOOLS[0], pb.Tool(name="f", parameters="{")]}),
    ("tools[0].parameters", {"tools": [pb.Tool(name="f", parameters="[]")]}),
    ("tools[0].parameters", {"tools": [pb.Tool(name="f", parameters='{"type": "string"}')]}),
    (
        "tools[0].parameters",
        {"tools": [pb.Tool(name="f", parameters='{"a":' * 99 + "1" + "}" * 99)]},
    ),
    ("tools[0].parameters", {"tools": [pb.Tool(name="f", parameters="[" * 10**4)]}),
    ("tools[0].parameters", {"tools": [pb.Tool(name="f", parameters='{"a": "\\ud800"}')]}),
    ("tools[0].parameters", {"tools": [pb.Tool(name="f", parameters='{"a": NaN}')]}),
    ("tool_choice.mode", {"tool_choice": pb.ToolChoice(mode=9)}),  # type: ignore[arg-type]
    ("tool_choice.names", {"tool_choice": choice(AUTO, "weather", "x")}),
    ("tool_choice", {"tools": [], "tool_choice": choice(REQUIRED)}),
    ("tool_choice", {"tools": [], "tool_choice": choice(AUTO, "weather")}),
    ("tools", {"num_beams": 2}),
    ("ignore_eos", {"ignore_eos": True}),
    ("constraint", {"constraint": pb.Constraint(regex="a")}),
]


@pytest.mark.parametrize(("field", "fields"), BAD)
def test_bad_fields_are_named(field: str, fields: dict[str, Any]) -> None:
    given = {"messages": pb.Conversation(messages=[HI]), "tools": TOOLS, **fields}
    message = pb.GenerateRequest(**given)
    with pytest.raises(InvalidFieldError) as raised:
        RequestReader(PARROT).read_generate(read_generate(message), ARRIVAL)
    assert raised.value.field == field


def test_choices_that_ask_for_nothing_need_no_tools() -> None:
    for mode in (pb.TOOL_MODE_UNSPECIFIED, AUTO, NONE):
        assert read(PARROT, tools=[], tool_choice=choice(mode)).tools is None
    assert read(PARROT, tool_choice=choice(NONE), num_beams=2).request.constraint is None
    free = read(PARROT, tool_choice=choice(NONE), constraint=pb.Constraint(regex="a"))
    assert free.request.constraint == Constraint("regex", "a")


def test_auto_needs_a_template_that_knows_how() -> None:
    with pytest.raises(InvalidFieldError, match="knows no tools") as raised:
        read(plain())
    assert raised.value.field == "tool_choice"
    with pytest.raises(UnsupportedError, match="can't follow a constraint"):
        read(replace(PARROT, grammars=None))
    with pytest.raises(UnsupportedError, match="no chat template"):
        read(replace(PARROT, template=None))


def test_model_says_how_it_writes_calls() -> None:
    assert model_message(PARROT).tool_call_format == "hermes"
    assert model_message(make_parrot(MISTRAL)).tool_call_format == "mistral"
    assert model_message(plain()).tool_call_format == ""
    assert model_message(replace(PARROT, grammars=None)).tool_call_format == ""


def answered(parsed: ParsedRequest, text: Text, tokens: list[int]) -> pb.Sequence:
    answer = Answer(parsed, text, lambda _: None)
    chunks = answer.take([TokenEvent("r", 0, token, None) for token in tokens])
    finish = FinishEvent("r", 0, "eos", 7, Usage(1, 0, len(tokens)), Timings(0, 0, 0))
    chunks += answer.take([finish])
    return response_message(merge(chunks, 1), text).sequences[0]


def test_marker_may_be_a_special_token() -> None:
    special = ("<|endoftext|>", "<tool_call>", "</tool_call>")
    tokenizer_json = byte_tokenizer(special)._json
    text = Text(tokenizer_json)
    grammars = Compiler(tokenizer_json, 259, [0])
    parsed = read(replace(PARROT, text=text))
    call = '{"name": "now", "arguments": {}}'
    tokens = text.encode_rendered(f"Hm.<tool_call>\n{call}\n</tool_call>")
    assert {1, 2} < set(tokens)
    assert parsed.request.constraint is not None
    matcher = grammars.compile_now(parsed.request.constraint).matcher()
    assert matcher.num_allowed(tokens) == len(tokens)
    said = answered(parsed, text, tokens)
    assert said.text == "Hm."
    assert [(each.name, each.arguments) for each in said.tool_calls] == [("now", "{}")]


def test_ids_are_the_same_for_the_same_request_and_seed_alone() -> None:
    text = Text(byte_tokenizer()._json)
    tokens = text.encode('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')

    def id_of(*messages: pb.Message, seed: int = 7) -> str:
        (call,) = answered(read(PARROT, messages, seed=seed), text, tokens).tool_calls
        return call.id

    first = id_of(HI)
    assert len(first) == 9
    assert first.isalnum()
    assert id_of(HI) == first
    assert len({first, id_of(HI, HI), id_of(HI, seed=8)}) == 3


def test_form_that_gets_too_complex_is_the_tools() -> None:
    answer = Answer(read(PARROT), PARROT.text, lambda _: None)
    with pytest.raises(InvalidFieldError) as raised:
        answer.take([FailEvent("r", InvalidFieldError("constraint", "is too complex"))])
    assert raised.value.field == "tools"


def test_pieces_are_put_together_where_they_belong() -> None:
    parsed = read(PARROT)
    text = Text(byte_tokenizer()._json)
    answer = Answer(parsed, text, lambda _: None)
    tokens = text.encode('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"')
    (chunk,) = answer.take([TokenEvent("r", 0, token, None) for token in tokens])
    assert [each.arguments for each in chunk.calls] == ["", '{"city": "Oslo"']
    (next_chunk,) = answer.take([TokenEvent("r", 0, text.encode("}")[0], None)])
    assert [(each.id, each.arguments) for each in next_chunk.calls] == [("", "}")]
    (call,) = merge_deltas(chunk.calls + next_chunk.calls)
    assert (call.name, call.arguments) == ("weather", '{"city": "Oslo"}')


def test_templates_are_seen_through() -> None:
    assert HERMES.count("<tool_call>") == 1
    lookalike = HERMES.replace('{"name": "{{ call.function.name }}"', "<f={{ call.function.name }}")
    template = ChatTemplate(lookalike, {})
    assert template.knows_tools
    assert template.writes_calls
    assert template.tool_call_format is None
