"""Answers that keep to a form, by the names that clients know."""

import json
import re
from typing import Any

import pytest

from tests.server.http_client import HttpClient

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "sure": {"type": "boolean"}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
}
ASKED = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 90}


def strict(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": strict(SCHEMA)},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA, "regex": None, "disable_fallback": True}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_match_a_schema(client: HttpClient, form: Any, stream: bool) -> None:
    reply = client.post("/v1/chat/completions", {**ASKED, **form, "stream": stream})
    if stream:
        choices = [each["choices"][0] for each in reply.events]
        text = "".join(each["delta"].get("content", "") for each in choices)
        reason = choices[-1]["finish_reason"]
    else:
        (choice,) = reply.json["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert reason == "stop"
    document = json.loads(text)
    assert document["kind"] in ("cat", "dog")
    assert document["sure"] in (True, False)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"guided_regex": "[x-z]{3}1?"}, "[x-z]{3}1?"),
        ({"structured_outputs": {"regex": "q+r"}}, "q+r"),
        ({"guided_choice": ["cat", "dog"]}, "cat|dog"),
        ({"structured_outputs": {"choice": ["cat", "dog"]}}, "cat|dog"),
        ({"guided_grammar": 'start: "a" "b"+'}, "ab+"),
        ({"grammar": 'root ::= "a" | "b" root'}, "b*a"),
        ({"structured_outputs": {"grammar": 'root ::= "no" " "?'}}, "no ?"),
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*"),
    ],
)
def test_answers_match_other_constraints(client: HttpClient, form: Any, pattern: str) -> None:
    asked = {"prompt": "m", "max_tokens": 30, "temperature": 1.0, "n": 3, "seed": 1}
    for choice in client.post("/v1/completions", {**asked, **form}).json["choices"]:
        # The letters that it would rather say go on for ever in some of these.
        assert re.fullmatch(pattern, choice["text"]) or choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("constraint", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": strict(None)}, "response_format.json_schema.schema"),
        ({"response_format": strict(5)}, "response_format.json_schema.schema"),
        ({"response_format": strict({"not": {}})}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": '{"x": "%s"}' % ("x" * 2**16)}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "cat"}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "grammar": "b"}, "grammar"),
        ({"guided_regex": "a", "num_beams": 2}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_bad_constraints_are_rejected_by_the_name_that_was_written(
    client: HttpClient, constraint: Any, param: str
) -> None:
    reply = client.post("/v1/chat/completions", {**ASKED, **constraint})
    assert (reply.status, reply.error["param"]) == (400, param)
