"""The command: what it writes, and what it refuses in words."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from quill.__main__ import main
from quill.export.convert.convert import TARGETS
from quill.model.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from quill.model.importers.import_weights import open_checkpoint
from tests.export.tiny import make_checkpoint
from tests.model.huggingface_models import saved
from tests.model.importers.test_gguf_architectures import NOMIC_TOKENS, nomic
from tests.model.successors import made
from tests.tiny_networks import LLAMA


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "checkpoint", make_checkpoint(LLAMA))
    return tmp_path / "checkpoint"


def convert(source: object, target: str, out: Path) -> int:
    return main(["convert", str(source), "--to", target, "--out", str(out)])


def test_a_checkpoint_goes_out_and_comes_in(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(checkpoint, "transformers", tmp_path / "new/out") == 0
    shown = capsys.readouterr()
    assert "LlamaForCausalLM" in shown.out
    assert "Writing" in shown.err  # the progress
    assert open_checkpoint(tmp_path / "new/out").config == load_checkpoint(checkpoint).config


def test_the_source_s_architecture_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(made("Mistral", sliding_window=None), tmp_path / "in")  # a Llama by another name
    assert convert(tmp_path / "in", "transformers", tmp_path / "out") == 0
    assert "MistralForCausalLM" in capsys.readouterr().out


def test_nomics_encoder_goes_out_as_onnx_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, file = nomic(tmp_path / "nomic.gguf")
    for target in ("transformers", "gguf"):
        assert convert(file.path, target, tmp_path / "out") == 2
        words = "Quill imports NomicBertModel, and can write it with --to onnx only."
        assert words in capsys.readouterr().err
    assert convert(file.path, "onnx", tmp_path / "out") == 0
    assert not (tmp_path / "out/config.json").exists()
    graph = onnxruntime.InferenceSession(tmp_path / "out/model.onnx")
    ids_BT = torch.randint(1, len(NOMIC_TOKENS), (2, 30), generator=torch.Generator())
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, 17:] = 0
    with torch.inference_mode():
        expected_BTD = theirs(ids_BT, attention_mask=mask_BT).last_hidden_state
    feeds = {"input_ids": ids_BT, "attention_mask": mask_BT, "token_type_ids": 0 * ids_BT}
    (found_BTD,) = graph.run(None, {name: each.numpy() for name, each in feeds.items()})
    for text, length in enumerate((30, 17)):
        expected_TD = expected_BTD[text, :length].numpy()
        np.testing.assert_allclose(found_BTD[text, :length], expected_TD, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("GGUF", "Did you mean gguf? There are transformers, gguf, onnx"),
        ("onxx", "Did you mean onnx?"),
        ("coreml", "unknown target 'coreml'. There are transformers, gguf, onnx"),
    ],
)
def test_an_unknown_target(
    checkpoint: Path, tmp_path: Path, given: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(checkpoint, given, tmp_path / "out") == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_replaced(
    checkpoint: Path, tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory/file").write_text("mine")
    for name in ("file", "directory"):
        assert convert(checkpoint, target, tmp_path / name) == 1
        assert "another name" in (shown := capsys.readouterr().err) or "is a directory" in shown
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in (tmp_path / "directory").iterdir()] == ["file"]


def test_a_bundle_has_no_weights_to_convert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/manifest.json").write_text("{}")
    assert convert(tmp_path / "bundle", "onnx", tmp_path / "out") == 1
    assert "name what it was exported from" in capsys.readouterr().err


def test_a_source_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("smollm2-135", "gguf", tmp_path / "out.gguf") == 1
    assert "Did you mean smollm2-135m?" in capsys.readouterr().err
