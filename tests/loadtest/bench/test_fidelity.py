"""A served translator against PyTorch's answers: equal ones pass, a changed one is found."""

import json
from pathlib import Path

import pytest

from quill.__main__ import main
from quill.model.data.splits import Pair
from quill.model.data.tokenizer import SpecialTokens, Tokenizer
from quill.model.evaluation.translation import evaluate_translation, write_answers
from tests.server.tiny_bundle import EOS, TinyBundle

PAIRS = [
    Pair("Stop", "Halt"),
    Pair("Restart the server", "Starte den Server neu"),
    Pair("a", "ein"),
]


@pytest.fixture
def answers(tiny_translator: TinyBundle, tmp_path: Path) -> Path:
    special = SpecialTokens(bos=0, eos=EOS, pad=0)
    tokenizer = Tokenizer.load(tiny_translator.directory / "tokenizer.json", special)
    found = evaluate_translation(tiny_translator.model, tokenizer, PAIRS, num_beams=2)
    path = tmp_path / "answers.jsonl"
    with path.open("w", encoding="utf-8") as file:
        write_answers(file, tiny_translator.model, tokenizer, PAIRS, found)
    return path


def test_equal_answers_are_counted_and_a_changed_one_is_an_error(
    tiny_translator: TinyBundle, answers: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "reference", str(tiny_translator.directory), str(answers), "--users", "2"]
    assert main(command) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [row[:2] for row in rows if row[:1] == ["greedy"]][-1] == ["greedy", "3"]
    assert [row[:3] for row in rows if row[:2] == ["2", "beams"]][-1] == ["2", "beams", "3"]

    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    lines[1]["answers"]["greedy"]["token_ids"][0] += 1
    answers.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert main(command) == 1
    assert "differ from PyTorch's: greedy" in capfd.readouterr().err

    lines[2]["source_ids"] = [99_999]
    answers.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert main(command) == 1
    assert "line 3 got INVALID_ARGUMENT" in capfd.readouterr().err


def test_another_file_is_refused(
    tiny_translator: TinyBundle, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").write_text('{"a": 1}\n')
    command = ["bench", "reference", str(tiny_translator.directory), str(tmp_path / "other")]
    assert main(command) == 2
    assert "isn't a file of `quill eval --answers`" in capfd.readouterr().err


def test_a_language_model_is_refused(
    bundle: Path, answers: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "reference", str(bundle), str(answers)]) == 2
    assert "isn't a translation model" in capfd.readouterr().err
