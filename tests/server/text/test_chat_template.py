"""Conversations become prompts by a template that may be anybody's."""

from contextlib import suppress

import pytest

from quill.model.data.tokenizer import byte_tokenizer
from quill.server.errors import InvalidFieldError, StartError
from quill.server.text.chat_template import ChatTemplate
from quill.server.text.tokenizer import Text

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_template_sees_messages_special_tokens_and_the_generation_prompt() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES) == "<s>Hi>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(10000000000) %}{% endfor %}",
        "{{ 'a' * 10000000 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0] + 1 }}",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_template_can_reach_nothing_and_harm_nobody(source: str) -> None:
    rendered = ""
    with suppress(InvalidFieldError):
        rendered = ChatTemplate(source, {}).render(MESSAGES)
    assert rendered == ""


def test_template_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(StartError, match="chat template"):
        ChatTemplate("{% for %}", {})


def test_json_is_written_as_it_is() -> None:
    template = ChatTemplate("{{ messages | tojson }}{{ tools | tojson(indent=1) }}", {})
    said = template.render([{"content": "<é>'&"}], [{"x": 1}])
    assert said == '[{"content": "<é>\'&"}][\n {\n  "x": 1\n }\n]'
    assert template.render([]) == "[]null"


def test_special_tokens_count_only_where_the_template_writes_them() -> None:
    text = Text(byte_tokenizer()._json)
    plain = [byte + 1 for byte in b"<|endoftext|>"]
    assert text.encode("<|endoftext|>") == plain
    assert text.encode_rendered("a<|endoftext|>") == [ord("a") + 1, 0]
    said = text.mark("x<|endoftext|>")
    assert text.encode_rendered(said + "<|endoftext|>") == [ord("x") + 1, *plain, 0]
