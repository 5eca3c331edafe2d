"""The training loop: it learns, alone or in company, and leaves what it promises."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quill.__main__ import main
from quill.model.checkpoint.checkpoint import load_checkpoint
from quill.model.data.batches import TextBatches
from quill.model.errors import ConfigError, ModelError
from quill.model.network.presets import preset
from quill.model.network.transformer import Transformer
from quill.model.training.distributed import Peers
from quill.model.training.recipes import RECIPES
from quill.model.training.trainer import Trainer, make_optimizer
from tests.model.runs import (
    last_checkpoint,
    log_lines,
    masked_arguments,
    pair_arguments,
    text_arguments,
    train,
    weight_bytes,
    weights,
    write_pairs,
    write_text,
)

ALONE = Peers(rank=0, num_processes=1, device=torch.device("cpu"))
CONFIG = dataclasses.replace(preset("tiny"), vocab_size=64, context=16, num_layers=2)
RECIPE = dataclasses.replace(RECIPES["tiny"], num_steps=30, batch_tokens=64, warmup_steps=3)


def make_trainer(**changes: object) -> Trainer:
    torch.manual_seed(0)
    ids = torch.arange(2000, dtype=torch.int32) * 7 % 64
    recipe = dataclasses.replace(RECIPE, **changes)  # type: ignore[arg-type]
    return Trainer(Transformer(CONFIG), TextBatches(ids, 16, 4, seed=0), recipe, ALONE)


def test_the_loss_falls_on_a_pattern_that_can_be_learnt() -> None:
    trainer = make_trainer()
    losses = [trainer.run_step().loss for _ in range(30)]
    assert losses[0] == pytest.approx(torch.tensor(64.0).log().item(), abs=0.5)
    assert losses[-1] < 0.5


def test_a_batch_in_pieces_gives_the_same_step() -> None:
    whole, pieces = make_trainer(), make_trainer(num_micro_batches=4)
    for _ in range(3):
        assert whole.run_step().loss == pytest.approx(pieces.run_step().loss, rel=1e-5)


def test_weight_decay_is_on_matrices_only() -> None:
    model = Transformer(CONFIG)
    names, optimizer = make_optimizer(model, RECIPE)
    decayed = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert optimizer.param_groups[0]["weight_decay"] == RECIPE.weight_decay
    assert optimizer.param_groups[1]["weight_decay"] == 0
    assert decayed == {id(p) for p in model.parameters() if p.dim() >= 2}
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_gradients_that_are_not_finite_stop_the_run() -> None:
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.embedding.weight.fill_(torch.inf)
    with pytest.raises(ModelError, match="aren't finite"):
        trainer.run_step()


def test_pieces_must_be_shared_evenly_among_processes() -> None:
    peers = Peers(rank=0, num_processes=2, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="multiple"):
        Trainer(Transformer(CONFIG), make_trainer()._batches, RECIPE, peers)


def test_a_run_leaves_a_log_a_curve_samples_and_a_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    train(text_arguments(write_text(tmp_path / "text.txt"), out))
    printed = capfd.readouterr()
    assert "bits per byte" in printed.out
    assert "s left" in printed.err
    lines = log_lines(out)
    assert [line["step"] for line in lines] == [4, 8, 9]
    assert all(line["held_out_loss"] > 0 for line in lines)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "step 9" in (out / "samples.txt").read_text()
    assert [path.name for path in sorted(out.glob("step-*"))] == ["step-00000009"]


def test_a_run_is_repeatable(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "pairs.tsv")
    for name in ("one", "two"):
        train(pair_arguments(data, tmp_path / name))
    assert weight_bytes(tmp_path / "one") == weight_bytes(tmp_path / "two")


def test_an_encoder_resumes_to_the_same_weights_and_logs_what_it_finds(tmp_path: Path) -> None:
    data = write_text(tmp_path / "text.txt")
    train(masked_arguments(data, tmp_path / "whole", "--keep", "2"))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "step-00000006")
    train(["train", "--resume", str(tmp_path / "parts")])
    assert weight_bytes(tmp_path / "parts") == weight_bytes(tmp_path / "whole")
    last = log_lines(tmp_path / "whole")[-1]
    assert 0 <= last["held_out_accuracy"] <= 1
    assert "held_out_bits_per_byte" not in last
    assert "⟨found|hidden⟩" in (tmp_path / "whole" / "samples.txt").read_text()
    checkpoint = load_checkpoint(last_checkpoint(tmp_path / "whole"))
    assert (checkpoint.prepend_bos, checkpoint.append_eos, checkpoint.stop_ids) == (True, True, ())
    assert checkpoint.special_tokens.mask is not None


@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_two_processes_compute_what_one_does(family: str, tmp_path: Path) -> None:
    if family == "causal":
        data, arguments = write_text(tmp_path / "text.txt"), text_arguments
    else:  # this preset has dropout: also its noise must be the same
        data, arguments = write_pairs(tmp_path / "pairs.tsv"), pair_arguments
    train(arguments(data, tmp_path / "one", "--micro-batches", "2"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, "-m", "quill", *arguments(data, tmp_path / "two")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    for alone, together in zip(
        log_lines(tmp_path / "one"), log_lines(tmp_path / "two"), strict=True
    ):
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        assert together["held_out_loss"] == pytest.approx(alone["held_out_loss"], rel=1e-3)
    expected = weights(tmp_path / "one")
    for name, tensor in weights(tmp_path / "two").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge", "--out", "x"], "unknown preset"),
        (["--preset", "tiny"], "--out is missing"),
        (["--out", "x", "--text", "missing.txt"], "missing.txt"),
        (["--out", "x", "--pairs", "p.tsv"], "reads text, not pairs"),
        (["--out", "x", "--corpus", "sotu", "--text", "t.txt"], "exclude each other"),
        (["--out", "x", "--preset", "seq2seq-tiny", "--corpus", "sotu"], "reads pairs"),
        (["--out", "x", "--steps", "0"], "num_steps"),
        (["--out", "x", "--learning-rate", "nan"], "learning_rate"),
        (["--out", "x", "--dropout", "1"], "dropout"),
        (["--resume", "x", "--seed", "5"], "takes only --steps and --device"),
    ],
)
def test_a_wrong_order_is_refused_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) in (1, 2)
    errors = capfd.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_that_is_not_there_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--out", str(tmp_path / "x"), "--device", "cuda"]) == 2
    assert "no working CUDA device" in capfd.readouterr().err
