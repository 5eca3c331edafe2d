"""`quill embed` and `quill fill-mask`, through the front door."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quill.server.cli.embed import cosines
from tests.server.cli.conftest import Run
from tests.server.running import Running, make_embedder, running_server
from tests.server.scripted_session import hidden_of, token_of


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_server(served=make_embedder()) as server:
        yield server


def test_each_text_is_a_line_of_numbers(run: Run) -> None:
    code, printed, _ = run("embed", "a", "b", "--dimensions", "2")
    assert (code, printed) == (0, "98.0 1.0\n99.0 1.0\n")


def test_texts_may_come_from_a_pipe_and_go_to_a_file(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\ncd\n" * 1500))
    out = tmp_path / "vectors.npy"
    code, printed, _ = run("embed", "-", "--pooling", "last", "--normalize", "--out", str(out))
    assert (code, printed) == (0, "")
    vectors_ND = np.load(out)
    assert (vectors_ND.shape, vectors_ND.dtype) == ((3000, 4), np.float32)
    expected_D = np.array(hidden_of(token_of(ord("d"))))
    np.testing.assert_allclose(vectors_ND[-1], expected_D / np.linalg.norm(expected_D), rtol=1e-6)


def test_texts_too_long_for_one_call_go_in_several(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = "é" * 40
    monkeypatch.setattr("quill.server.cli.embed.MAX_BYTES", 200)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{line}\n" * 5 + "x" * 90 + "\nab\n"))
    code, printed, _ = run("embed", "-", "--json")
    assert (code, printed.count('"num_tokens"')) == (0, 7)
    assert printed.count('"embeddings"') == 3, "two lines, two lines, and the rest"


def test_json_has_everything(run: Run) -> None:
    _, printed, _ = run("embed", "abc", "--json", "--no-normalize")
    answer = json.loads(printed)
    assert answer["embeddings"][0]["num_tokens"] == 3
    assert answer["model"] == "reciter"


def test_what_is_wrong_is_said_in_a_line(run: Run, tmp_path: Path) -> None:
    assert "no text to embed" in run("embed")[2]
    assert "dimensions is 5; it must be from 1 to 4" in run("embed", "a", "--dimensions=5")[2]
    assert "only encoders fill masks" in run("fill-mask", "a [MASK]")[2]
    nowhere = str(tmp_path / "none" / "vectors.npy")
    assert run("embed", "a", "--out", nowhere)[:2] == (1, "")


def test_words_vectors_are_compared_in_a_picture(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "apple.png"
    code, printed, _ = run("embed", "--compare", "Apple", "--out", str(out))
    assert code == 0
    assert out.stat().st_size > 10_000
    assert printed.startswith(" 1.00  1.00"), "this model's tokens know nothing of each other"
    monkeypatch.setattr("sys.stdin", io.StringIO("a pear\n\nthe pear tree\n"))
    code, printed, _ = run("embed", "-", "--compare", "pear", f"--out={out}")
    assert (code, printed.count("\n")) == (0, 3)


def test_words_that_cant_be_compared_are_refused(run: Run, tmp_path: Path) -> None:
    assert "needs two sentences or more" in run("embed", "--compare", "pear")[2]
    assert "--compare needs a word" in run("embed", "--compare", " ", "a b", "c d")[2]
    assert "needs two sentences" in run("embed", "--compare", "pear", "one pear")[2]
    assert "should end in .png" in run("embed", "--compare=apple", f"--out={tmp_path}/a.jpg")[2]


def test_cosines_are_of_directions() -> None:
    alike_NN = cosines([[1.0, 0.0], [3.0, 0.0], [0.0, -2.0]])
    np.testing.assert_allclose(alike_NN, [[1, 1, 0], [1, 1, 0], [0, 0, 1]])
