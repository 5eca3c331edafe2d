"""The file of answers."""

from pathlib import Path

import pytest

from quill.server.client.batch.answer import ERROR
from quill.server.client.batch.output import Output, OutputError

HEADS = [
    b'{"line": 1, "digest": "aa"',
    b'{"line": 2, "digest": "bb"',
    b'{"line": 3, "digest": "cc"',
]
LINES = [HEADS[0] + b', "answer": {}}\n', HEADS[1] + b', "error": {}, "id": "error"}\n']


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_goes_on_after_what_is_whole_wherever_it_was_cut(path: Path) -> None:
    whole = b"".join(LINES)
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        with Output(path) as output:
            num_lines, num_failed = output.go_on(HEADS, ERROR)
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
    with Output(path) as output, pytest.raises(OutputError, match="isn't an answer that belongs"):
        output.go_on(HEADS, ERROR)
    assert path.read_bytes() == content


def test_there_is_one_writer(path: Path) -> None:
    with Output(path), pytest.raises(OutputError, match="another process is writing"):
        Output(path)
    with Output(path):
        pass


def test_what_cannot_be_written_is_an_error_in_words(path: Path) -> None:
    with pytest.raises(OutputError, match="can't write"):
        Output(path / "nowhere")
    with Output(Path("/dev/full")) as output, pytest.raises(OutputError, match="No space left"):
        output.append(b"a line\n")
