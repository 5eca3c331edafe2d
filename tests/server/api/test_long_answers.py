"""Long answers are written beside the event loop, which every other call needs."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quill.server.client.sync_client import Client
from quill.server.frontend import call
from quill.server.text.tokenizer import Text
from tests.server.http_client import HttpClient
from tests.server.process import NEVER
from tests.server.running import Running, running_server
from tests.server.scripted_session import TIMEOUT_S

PROMPT = "a" * 150
RATED: dict[str, Any] = {"max_new_tokens": 1, "prompt_logprobs": 20, "timeout_s": TIMEOUT_S}
CALLS: dict[str, Callable[[Client], object]] = {
    "Generate": lambda client: client.generate(PROMPT, **RATED),
    "GenerateStream": lambda client: list(client.stream(PROMPT, **RATED)),
    "Score": lambda client: client.score(PROMPT, timeout_s=TIMEOUT_S),
    "Tokenize": lambda client: client.tokenize(2 * PROMPT, timeout_s=TIMEOUT_S),
}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_server(http_port=0) as server:
        yield server


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> set[threading.Thread]:
    """The threads that looked up tokens' texts."""
    found: set[threading.Thread] = set()
    piece = Text.piece

    def noted(text: Text, token_id: int) -> str:
        found.add(threading.current_thread())
        return piece(text, token_id)

    monkeypatch.setattr(Text, "piece", noted)
    monkeypatch.setattr(call, "MAX_INLINE_TOKENS", 100)
    return found


@pytest.mark.parametrize("method", CALLS)
def test_over_grpc(running: Running, writers: set[threading.Thread], method: str) -> None:
    with Client(running.address, NEVER) as client:
        CALLS[method](client)
    assert writers
    assert running._thread not in writers


def test_of_a_chat(running: Running, writers: set[threading.Thread]) -> None:
    asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
    reply = HttpClient(running.http_port).post(
        "/v1/chat/completions", asked | {"prompt_logprobs": 20}
    )
    assert reply.status == 200
    assert writers
    assert running._thread not in writers
