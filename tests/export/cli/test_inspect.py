"""`quill inspect`, as a person runs it."""

import shutil
from pathlib import Path

import pytest

from quill.__main__ import main
from tests.export.tiny import Exported


def inspect(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["inspect", str(directory)]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_inspect_shows_what_is_in_a_bundle(
    llama: Exported, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    printed = inspect(llama.directory, capsys)
    sizes = llama.manifest.sizes
    for text in (
        "causal",
        f"{sizes.num_parameters:,}",
        "96 tokens",
        "2 Attention",
        "the source's own values (q4_1, q8_0; ",
        "licence: MIT",
        "bit-identical for batches of 1, 2, 3, 8, 32, and for a prompt of 96 tokens in",
        "not measured: it needs the device",
        "0.0 MB (0.5 KB a token)",
        llama.manifest.files[0].sha256,
    ):
        assert text in printed, text


def test_hashes_are_whole_on_a_narrow_terminal(
    llama: Exported, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["inspect", str(llama.directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for file in llama.manifest.files:
        assert any(line.startswith(f"{file.sha256}  {file.name} ") for line in lines), file.name


def test_inspect_shows_both_stacks_of_a_seq2seq_model(
    seq2seq: Exported, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    printed = inspect(seq2seq.directory, capsys)
    assert "1 encoder, 2 decoder" in printed
    assert "encoder's operators" in printed
    assert "none: token ids only" in printed


def test_a_damaged_bundle_is_refused_and_the_file_named(
    llama: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(llama.directory, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / llama.manifest.graphs[0].weights
    data = bytearray(weights.read_bytes())
    data[1000] ^= 0x40
    weights.write_bytes(data)
    assert main(["inspect", str(tmp_path)]) == 1
    assert f"{weights.name} has the SHA-256" in capsys.readouterr().err
