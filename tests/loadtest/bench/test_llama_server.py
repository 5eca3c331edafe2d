"""llama.cpp's server as a backend: its command line, its events, its start and its end.

Compiling the program takes ten minutes, so a fake that answers as it does is measured here.
"""

import itertools
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quill.loadtest.bench.backends.llama_server import (
    LlamaConfig,
    LlamaServer,
    llama_server,
    options,
    read_answer,
    read_events,
    request,
)
from quill.loadtest.errors import BackendError
from tests.loadtest.fake_llama_server import make_program

CONFIG = LlamaConfig(Path("llama-server"), Path("q8_0.gguf"), 2, 32, 1256, shares_prefix=True)


def test_every_user_has_a_slot_with_enough_context() -> None:
    words = options(CONFIG, 1234)
    given = dict(itertools.pairwise(words))
    assert (given["--model"], given["--host"], given["--port"]) == (
        "q8_0.gguf", "127.0.0.1", "1234"
    )  # fmt: skip
    assert (given["-np"], given["--ctx-size"]) == ("32", str(32 * 1256))
    assert given["--threads"] == given["--threads-batch"] == "2"
    assert "--no-cache-prompt" not in words
    alone = options(CONFIG._replace(shares_prefix=False), 1234)
    assert "--no-cache-prompt" in alone
    assert alone[alone.index("--cache-ram") + 1] == "0"


def test_request_overrides_all_sampling_defaults() -> None:
    body = request([5, 6], 64, 1.0)
    assert (body["prompt"], body["n_predict"], body["ignore_eos"]) == ([5, 6], 64, True)
    sampling = [body[name] for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")]
    assert sampling == [1.0, 0, 1.0, 0.0, 1.0]


def test_events_are_read_and_comments_are_not() -> None:
    lines = [b'data: {"stop":false}\n', b"\n", b":\n", b"\n", b'data:{"stop":true}\r\n', b"\n"]
    assert list(read_events(lines)) == [{"stop": False}, {"stop": True}]


def test_last_event_counts_the_tokens() -> None:
    now_s = time.perf_counter()
    lines = [b'data: {"content":"a","stop":false,"tokens_predicted":1}\n'] * 3
    streamed = read_answer([*lines, b'data: {"stop":true,"tokens_predicted":64}\n'], now_s - 2)
    assert streamed.num_tokens == 64
    assert 2 <= streamed.first_token_s < 3


@pytest.mark.parametrize(
    ("last", "message"),
    [(b'data: {"error":{"code":500,"message":"no room"}}\n', "no room"), (b"\n", "last event")],
)
def test_stream_that_breaks_off_is_an_error(last: bytes, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        read_answer([b'data: {"content":"a","stop":false}\n', last], 0.0)


@contextmanager
def fake(directory: Path, model: str = "q8_0.gguf") -> Iterator[tuple[LlamaServer, int]]:
    program = make_program(directory / "llama-server")
    (directory / model).touch()
    config = CONFIG._replace(program=program, model=directory / model)
    with llama_server(config, directory / "log") as server:
        yield server, server._pid


def test_server_is_awaited_loaded_by_many_and_ended(tmp_path: Path) -> None:
    with fake(tmp_path) as (server, pid):
        assert (server.info.name, server.info.kind) == ("llama-server", "Q8_0")
        served = server.load([[1, 2, 3]], num_users=8, num_new=64, duration_s=0.0)
        assert server.memory() > 2**20
    assert served["num_tokens"] == 64 * served["num_requests"] == 64 * 8
    assert not Path(f"/proc/{pid}").exists()
    log = (tmp_path / "log").read_text()
    assert log.count("loading") >= 1, "it wasn't ready at once"
    bodies = [json.loads(line) for line in re.findall(r"^request (.*)$", log, re.MULTILINE)]
    assert bodies == [request([1, 2, 3], 64, 0.0)] * 8


def test_rejection_has_its_reason_and_a_server_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with fake(tmp_path) as (server, _), pytest.raises(BackendError, match=r"400: .*no prompt"):
        server.stream(request([], 1, 0.0))
    with pytest.raises(BackendError, match="broke off"):
        server.stream(request([1], 1, 0.0))


def test_program_that_ends_at_its_start_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    with (
        pytest.raises(BackendError, match="didn't start: no such model"),
        fake(tmp_path, model="none.gguf"),
    ):
        pass
