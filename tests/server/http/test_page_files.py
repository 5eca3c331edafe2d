"""What the page is made of, without a browser: who may have it, and what it may do."""

import re
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from quill.server.auth.key_file import add_key
from tests.server.running import Running, running_server
from tests.server.scripted_session import TIMEOUT_S

PAGE = Path(__file__).resolve().parents[3] / "server" / "http" / "page"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    """A server that wants keys, and one of these."""
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    key = add_key(keys, "alice")
    with running_server(http_port=0, api_keys=keys) as running:
        yield running, key


def get(running: Running, path: str, key: str | None = None) -> tuple[Message, bytes]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    url = f"http://127.0.0.1:{running.server.http_port}{path}"
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        return reply.headers, reply.read()


def test_the_page_and_all_that_it_names_is_there_for_everybody(guarded: Any) -> None:
    running, _ = guarded
    headers, body = get(running, "/")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    named = {*re.findall(r'(?:href|src)="(page/[^"]+)"', body.decode())}
    scripts = [path.read_text() for path in PAGE.glob("*.js")]
    named |= {f"page/{name}" for each in scripts for name in re.findall(r'from "./(.+)"', each)}
    assert named == {f"page/{path.name}" for path in PAGE.iterdir() if path.name != "index.html"}
    for name in named:
        kind = get(running, f"/{name}")[0]["content-type"].partition(";")[0]
        assert kind in {"text/javascript", "text/css", "image/svg+xml"}


@pytest.mark.parametrize("path", ["/model", "/stats"])
def test_what_is_said_of_the_model_is_for_those_with_a_key(guarded: Any, path: str) -> None:
    running, key = guarded
    with pytest.raises(HTTPError, match="401") as refused:
        get(running, path)
    refused.value.close()
    assert get(running, path, key)[1].startswith(b"{")


def test_no_script_writes_html_and_no_file_names_another_host() -> None:
    for path in PAGE.iterdir():
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        addresses = set(re.findall(r"https?://[^\s\"']+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name
