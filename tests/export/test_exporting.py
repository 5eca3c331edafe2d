"""`quill export`, as a person runs it."""

from pathlib import Path

import pytest

import quill
from export.errors import ExportError
from export.exporting import parse_precisions
from export.manifest import read_manifest
from model.checkpoint import save_checkpoint
from tests.export.tiny import LLAMA, make_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "checkpoint", make_checkpoint(LLAMA))
    return tmp_path / "checkpoint"


def test_export_writes_a_bundle_and_shows_a_table(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle"
    assert quill.main(["export", str(checkpoint), "--out", str(out), "--precision", "fp32"]) == 0
    printed = capsys.readouterr()
    assert "fp32: verifying" in printed.err
    for word in ("fp32", "MB", "worst diff.", "perplexity", "ms a step"):
        assert word in printed.out
    manifest = read_manifest(out)
    assert manifest.precisions == ("fp32",)
    assert manifest.name == "bundle"


def test_export_without_verification_says_so(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(checkpoint), "--out", str(tmp_path / "b"), "--no-verify"]
    assert quill.main([*arguments, "--precision", "fp32"]) == 0
    assert "not verified" in capsys.readouterr().out
    assert read_manifest(tmp_path / "b").graphs[0].verification is None


def test_a_missing_checkpoint_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = quill.main(["export", str(tmp_path / "nowhere"), "--out", str(tmp_path / "b")])
    assert code == 1
    printed = capsys.readouterr().err
    assert printed.startswith("quill: there is no checkpoint at")
    assert printed.count("\n") == 1


def test_an_unknown_precision_is_refused_with_those_there_are(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(checkpoint), "--out", str(tmp_path / "b"), "--precision", "fp8"]
    assert quill.main(arguments) == 1
    assert (
        "unknown precision 'fp8'; there are fp32, int4, int8, quill4, fp16"
        in capsys.readouterr().err
    )


def test_precisions_come_in_a_fixed_order_and_once() -> None:
    assert parse_precisions("int4, fp32,int4") == ("fp32", "int4")
    with pytest.raises(ExportError, match="unknown precision ''"):
        parse_precisions("fp32,")
