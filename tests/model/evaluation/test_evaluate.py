"""`quill eval`: the right numbers for both families, next to copying the source."""

import shutil
from pathlib import Path

import pytest
import sacrebleu

from quill.__main__ import main
from quill.model.evaluation.translation import score_translations
from tests.model.runs import (
    last_checkpoint,
    masked_arguments,
    pair_arguments,
    text_arguments,
    train,
    write_pairs,
    write_text,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


@pytest.fixture(scope="module")
def text_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "text"
    train(text_arguments(text, out))
    return out


def test_a_causal_run_is_scored_as_training_scored_it(
    text: Path, text_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(text_arguments(text, text_run.parent / "again"))
    told = capfd.readouterr().out.split("Held out: loss ")[1].split(",")[0]
    assert main(["eval", str(text_run), "--text", str(text)]) == 0
    printed = capfd.readouterr().out
    assert "bits per byte" in printed
    assert told in printed


def test_an_encoder_is_scored_as_training_scored_it(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(masked_arguments(text, tmp_path / "run"))
    told = capfd.readouterr().out.split("Held out: loss ")[1]
    assert main(["eval", str(tmp_path / "run")]) == 0
    printed = capfd.readouterr().out
    assert told.split(",")[0] in printed
    assert told.split(", ")[2].split(" of ")[0] in printed, "the share that was found"
    assert main(["eval", str(tmp_path / "run"), "--stride", "4"]) == 2
    assert "--stride is for language models" in capfd.readouterr().err


def test_the_stride_decides_how_much_past_each_token_has(
    text: Path, text_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    losses = []
    for stride in ("16", "1"):
        assert main(["eval", str(text_run), "--text", str(text), "--stride", stride]) == 0
        losses.append(float(capfd.readouterr().out.splitlines()[3].split("│")[2]))
    assert losses[1] != losses[0]


@pytest.mark.parametrize("stride", ["0", "-1", "17"])
def test_a_stride_outside_the_context_is_refused(
    stride: str, text: Path, text_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", str(text_run), "--text", str(text), f"--stride={stride}"]
    assert main(arguments) == 2
    assert f"--stride is {stride}" in capfd.readouterr().err


def test_a_translator_is_scored_beside_copying_the_source(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pairs = write_pairs(tmp_path / "pairs.tsv")
    train(pair_arguments(pairs, tmp_path / "run"))
    arguments = ["eval", str(tmp_path / "run"), "--pairs", str(pairs), "--beams", "2"]
    assert main([*arguments, "--answers", str(tmp_path / "nowhere" / "x")]) == 2
    assert "nowhere/x can't be written" in capfd.readouterr().err
    assert main(arguments) == 0
    printed = capfd.readouterr().out
    assert all(name in printed for name in ("copy the source", "greedy", "2 beams", "BLEU", "chrF"))


def test_a_perfect_translation_scores_a_hundred_and_copying_less() -> None:
    references = ["Das Licht im Flur ist an.", "Die Tür ist jetzt offen."]
    perfect = score_translations("perfect", references, references)
    assert (perfect.bleu, perfect.chrf) == pytest.approx((100, 100))
    copied = ["The light in the hall is on.", "The door is now open."]
    copy = score_translations("copy", copied, references)
    assert copy.bleu == sacrebleu.corpus_bleu(copied, [references]).score
    assert copy.bleu < 20


def test_a_run_is_scored_on_its_own_data_unless_told_otherwise(
    text: Path, text_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scores = []
    for arguments in ([str(text_run)], [str(text_run), "--text", str(text)]):
        assert main(["eval", *arguments]) == 0
        printed = capfd.readouterr()
        scores.append(printed.out)
        assert "scoring" in printed.err
    assert scores[0] == scores[1]


def test_a_run_is_not_scored_on_data_that_has_changed_or_that_nobody_knows(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = Path(shutil.copy(text, tmp_path / "text.txt"))
    train(text_arguments(data, tmp_path / "run"))
    data.write_text(data.read_text() + "One line more.")
    assert main(["eval", str(tmp_path / "run")]) == 1
    assert "it has changed" in capfd.readouterr().err
    alone = shutil.copytree(last_checkpoint(tmp_path / "run"), tmp_path / "alone")
    assert main(["eval", str(alone)]) == 1
    assert "no run.json beside the checkpoint names them" in capfd.readouterr().err
    assert main(["eval", str(alone), "--text", str(data)]) == 0
