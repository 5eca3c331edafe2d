"""Events that are written from a template are those that JSON's own writer makes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quill.server.http.exchange import event
from quill.server.http.output import AnswerInfo, TextEvents
from tests.server.running import make_served

INFO = AnswerInfo(id="chatcmpl-\0", kind="chat.completion.chunk", served=make_served(), seed=5)


@pytest.mark.parametrize("rest", [{}, {"usage": None}])
@given(text=st.text())
def test_a_template_writes_what_json_would(rest: dict[str, Any], text: str) -> None:
    def choice(content: str) -> dict[str, Any]:
        return {"index": 0, "delta": {"content": content}, "finish_reason": None}

    template = TextEvents(INFO, choice(TextEvents.PLACE), **rest)
    assert template.write(text) == event(INFO.wrap([choice(text)], **rest))
