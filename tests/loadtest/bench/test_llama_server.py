"""llama.cpp's server as a contender: its command line, its events, its beginning and its end.

The program itself takes ten minutes to compile, so a stand-in that speaks as it does is asked here.
"""

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quill.loadtest.bench.contenders.llama_server import (
    llama_server,
    options,
    read_answer,
    read_events,
    request,
)
from quill.loadtest.bench.contenders.serving import Load, Serving, Streamed
from quill.loadtest.errors import ContenderError
from tests.loadtest.reciting_llama_server import make_program

LOAD = Load(num_users=32, num_shared=1000, num_new=64, context=1256, temperature=0.0, num_threads=2)
ALONE = Load(**vars(LOAD) | {"num_shared": 0, "context": 256})


def test_every_user_has_a_slot_with_the_context_that_it_needs() -> None:
    words = options(Path("q8_0.gguf"), 1234, LOAD)
    given = dict(itertools.pairwise(words))
    assert given["--model"] == "q8_0.gguf"
    assert given["--host"] == "127.0.0.1"
    assert given["--port"] == "1234"
    assert given["-np"] == "32"
    assert given["--ctx-size"] == str(32 * 1256)
    assert given["--threads"] == given["--threads-batch"] == "2"
    assert "--no-cache-prompt" not in words


def test_prompts_are_kept_only_where_they_are_shared() -> None:
    words = options(Path("q8_0.gguf"), 1234, ALONE)
    assert "--no-cache-prompt" in words
    assert words[words.index("--cache-ram") + 1] == "0"


def test_sampling_is_said_in_full() -> None:
    asked = request([5, 6], Load(**vars(LOAD) | {"temperature": 1.0}))
    assert asked["prompt"] == [5, 6]
    assert asked["n_predict"] == 64
    assert asked["ignore_eos"] is True
    cuts = [asked[name] for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")]
    assert cuts == [1.0, 0, 1.0, 0.0, 1.0]


def test_events_are_read_and_comments_are_not() -> None:
    lines = [b'data: {"stop":false}\n', b"\n", b":\n", b"\n", b'data:{"stop":true}\r\n', b"\n"]
    assert list(read_events(lines)) == [{"stop": False}, {"stop": True}]


def test_last_event_says_how_many_tokens_came() -> None:
    now_s = time.perf_counter()
    lines = [b'data: {"content":"a","stop":false,"tokens_predicted":1}\n'] * 3
    streamed = read_answer([*lines, b'data: {"stop":true,"tokens_predicted":64}\n'], now_s - 2)
    assert streamed.num_tokens == 64
    assert 2 <= streamed.first_token_s < 3


@pytest.mark.parametrize(
    ("last", "told"),
    [(b'data: {"error":{"code":500,"message":"no room"}}\n', "no room"), (b"\n", "last event")],
)
def test_stream_that_breaks_off_is_an_error(last: bytes, told: str) -> None:
    with pytest.raises(ContenderError, match=told):
        read_answer([b'data: {"content":"a","stop":false}\n', last], 0.0)


@contextmanager
def standing_in(directory: Path, load: Load = LOAD, model: str = "q8_0.gguf") -> Iterator[Serving]:
    program = make_program(directory / "llama-server")
    with llama_server(program, directory / model, load, directory / "log") as server:
        yield server


def test_server_is_waited_for_asked_by_many_and_ended(tmp_path: Path) -> None:
    streamed: list[Streamed] = []
    with standing_in(tmp_path) as server:
        assert (server.name, server.kind) == ("llama-server", "Q8_0")
        users = [
            threading.Thread(target=lambda: streamed.append(server.stream([1, 2, 3])))
            for _ in range(8)
        ]
        for user in users:
            user.start()
        for user in users:
            user.join(30)
        assert Path(f"/proc/{server.pid}").exists()
    assert [each.num_tokens for each in streamed] == [64] * 8
    assert not Path(f"/proc/{server.pid}").exists()
    said = (tmp_path / "log").read_text()
    assert said.count("loading") >= 1, "it wasn't ready at once"
    asked = [json.loads(line) for line in re.findall(r"^asked (.*)$", said, re.MULTILINE)]
    assert asked == [request([1, 2, 3], LOAD)] * 8


def test_refusal_is_told_with_its_reason(tmp_path: Path) -> None:
    with standing_in(tmp_path) as server, pytest.raises(ContenderError, match=r"400: .*no prompt"):
        server.stream([])


def test_program_that_ends_is_told_with_its_last_word(tmp_path: Path) -> None:
    with (
        pytest.raises(ContenderError, match="didn't start: no such model"),
        standing_in(tmp_path, model="none.gguf"),
    ):
        pass


def test_server_that_is_gone_is_an_error_in_words(tmp_path: Path) -> None:
    with standing_in(tmp_path) as server:
        stream = server.stream
    with pytest.raises(ContenderError, match="broke off"):
        stream([1])
