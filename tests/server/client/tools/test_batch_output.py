"""The file of answers, and how a batch reports its progress."""

import contextlib
import io
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from quill.server.client.tools.batch_lines import ERROR
from quill.server.client.tools.batch_output import Output, OutputError, Progress

HEADS = [
    b'{"line": 1, "digest": "aa"',
    b'{"line": 2, "digest": "bb"',
    b'{"line": 3, "digest": "cc"',
]
LINES = [HEADS[0] + b', "answer": {}}\n', HEADS[1] + b', "error": {}, "id": "error"}\n']


@contextlib.contextmanager
def limited_to(num_bytes: int) -> Iterator[None]:
    """No file can be larger, meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_goes_on_after_what_is_whole_wherever_it_was_cut(path: Path) -> None:
    whole = b"".join(LINES)
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        with Output(path) as output:
            num_lines, num_failed = output.resume(HEADS, ERROR)
            assert num_lines == whole[:end].count(b"\n")
            assert num_failed == (num_lines == 2)
            output.append(b"".join(LINES[num_lines:]))
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    [
        LINES[1],
        LINES[0] + b"\n",
        b"".join(LINES) + b'{"line": 3, "digest": "dd"}\n',
        b"".join(LINES) + HEADS[2] + b"}\n" + b"more\n",
        b"somebody's own words",
    ],
)
def test_a_file_of_something_else_is_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with (
        Output(path) as output,
        pytest.raises(OutputError, match="isn't the answer to"),
    ):
        output.resume(HEADS, ERROR)
    assert path.read_bytes() == content


def test_there_is_one_writer(path: Path) -> None:
    with Output(path), pytest.raises(OutputError, match="another process is writing"):
        Output(path)
    with Output(path):
        pass


def test_what_cannot_be_written_is_an_error_in_words(path: Path) -> None:
    with pytest.raises(OutputError, match="can't write"):
        Output(path / "nowhere")
    with Output(path) as output, limited_to(3), pytest.raises(OutputError, match="File too large"):
        output.append(b"a line\n")


def test_what_has_no_end_is_not_read(path: Path) -> None:
    """/dev/full is nothing but zeros, and a pipe waits for ever."""
    os.mkfifo(path)
    for each in (path, Path("/dev/full")):
        with pytest.raises(OutputError, match="must be a file"):
            Output(each)


def test_what_is_told() -> None:
    now_s = 0.0
    progress = Progress(num_all=10_000, num_before=4_000, stream=io.StringIO(), clock=lambda: now_s)
    assert progress.text() == "[#########...............] 4,000/10,000 lines  0 tokens/s"
    for number in range(1_000):
        progress.add(20, is_error=number < 3)
    now_s = 20.0
    told = "[############............] 5,000/10,000 lines  1,000 tokens/s  3 failed  1:40 left"
    assert progress.text() == told
    for _ in range(5_000):
        progress.add(20, is_error=False)
    now_s = 3_700.0
    assert progress.text().endswith(" 10,000/10,000 lines  32 tokens/s  3 failed  took 1:01:40")


def test_a_line_is_told_now_and_then_where_there_is_no_terminal() -> None:
    now_s, stream = 0.0, io.StringIO()
    progress = Progress(num_all=30, num_before=0, stream=stream, clock=lambda: now_s)
    for _ in range(30):
        now_s += 1
        progress.add(1, is_error=False)
    progress.end()
    assert [line.split("] ")[1] for line in stream.getvalue().splitlines()] == [
        "10/30 lines  1 tokens/s  0:20 left",
        "20/30 lines  1 tokens/s  0:10 left",
        "30/30 lines  1 tokens/s  took 0:30",
        "30/30 lines  1 tokens/s  took 0:30",
    ]
