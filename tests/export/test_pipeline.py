"""Writing a bundle: whole or absent, and only where it may be."""

import contextlib
import dataclasses
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

from quill.export.bundle.manifest import MANIFEST_FILE, check_files, read_manifest
from quill.export.errors import BundleError, VerificationError
from quill.export.pipeline import (
    ExportOptions,
    check_replaceable,
    describe,
    write_bundle,
)
from quill.export.quantize.quantization import quantize_floats
from quill.export.quantize.quantizers import Quantized
from quill.export.verify.recipe import Stage
from quill.export.verify.verifier import Tick, check_default
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.network.presets import preset
from tests.export.tiny import Exported, make_checkpoint, quantized_at_source
from tests.operators import OWN
from tests.tiny_networks import LLAMA

ROOT = Path(__file__).resolve().parents[2]
FP32 = ExportOptions(precisions=("fp32",))


def test_a_bundle_is_read_back_and_its_hashes_hold(exported: Exported) -> None:
    manifest = read_manifest(exported.directory)
    assert manifest == exported.manifest
    check_files(exported.directory, manifest)


def test_a_bundle_holds_its_files_and_no_others(llama: Exported, gpt: Exported) -> None:
    names = {path.name for path in llama.directory.iterdir()}
    graphs = {f"decoder.{p}.onnx" for p in ("fp32", *OWN, "fp16")}
    weights = {f"weights.{p}.bin" for p in ("fp32", *OWN, "fp16")}
    assert names == {"manifest.json", "tokenizer.json"} | graphs | weights
    assert gpt.manifest.tokenizer is None
    assert not (gpt.directory / "tokenizer.json").exists()


def test_the_manifest_says_what_the_checkpoint_says(llama: Exported) -> None:
    manifest, checkpoint = llama.manifest, llama.checkpoint
    assert manifest.name == "tiny-llama"
    assert manifest.family == "causal"
    assert manifest.onnxruntime == onnxruntime.__version__
    assert manifest.stop_ids == (0,)
    assert manifest.special_tokens.eos == 0
    assert manifest.chat_template == checkpoint.chat_template
    assert manifest.generation == checkpoint.generation
    assert manifest.provenance == checkpoint.provenance
    assert manifest.sizes.num_parameters == checkpoint.build().num_parameters()


def test_latent_attention_keeps_less_than_a_quarter_of_what_its_heads_would() -> None:
    config = preset("mla-tiny")
    assert config.latent is not None
    heads = config.num_heads * (config.head_size + config.latent.value_size)
    kept = describe("mla", Checkpoint(config, {})).cache_bytes_per_token("float16")
    assert kept == config.num_layers * 112 * 2
    assert kept <= config.num_layers * heads * 2 / 4


def test_the_measurements_are_in_the_manifest(exported: Exported) -> None:
    for graphs in exported.manifest.graphs:
        found = graphs.verification
        assert found is not None
        assert found.num_tokens > 100
        assert found.step_ms > 0
        assert found.perplexity == pytest.approx(found.reference_perplexity, rel=0.1)
    fp32 = exported.manifest.graphs_in("fp32").verification
    assert fp32 is not None
    assert fp32.worst_difference < 1e-4
    assert fp32.greedy_agreement == 1
    assert fp32.perplexity == pytest.approx(fp32.reference_perplexity, rel=1e-6)


def test_the_sources_integers_are_named_as_such(llama: Exported) -> None:
    said = llama.manifest.graphs_in("quill4").quantization or ""
    assert said.startswith("the source's own values (q4_1, q8_0; ")
    assert llama.manifest.graphs_in("fp32").quantization is None


def test_exporting_twice_gives_the_same_bytes(llama: Exported, tmp_path: Path) -> None:
    options = ExportOptions(precisions=("quill4",), verify=False)
    again = write_bundle(tmp_path / "again", llama.checkpoint, options)
    hashes = {file.name: file.sha256 for file in llama.manifest.files}
    for file in again.files:
        assert file.sha256 == hashes[file.name], file.name
    assert again.graphs[0].verification is None


KILLED_AT_THE_FOURTH_MATRIX = """
import os, signal, sys
from pathlib import Path
from quill.export.pipeline import ExportOptions, write_bundle
from quill.export.quantize import matrices
from tests.export.tiny import make_checkpoint
from tests.tiny_networks import LLAMA

quantize, made = matrices.quantize_floats, []

def quantize_floats(name, *args):
    made.append(name)
    if len(made) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return quantize(name, *args)

matrices.quantize_floats = quantize_floats
options = ExportOptions(precisions=("quill4",), verify=False)
write_bundle(Path(sys.argv[1]), make_checkpoint(LLAMA), options)
"""


def test_a_killed_export_continues_after_its_last_matrix_and_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_AT_THE_FOURTH_MATRIX, str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    made: list[str] = []

    def spied(name: str, *args: Any) -> Quantized:
        made.append(name)
        return quantize_floats(name, *args)

    monkeypatch.setattr("quill.export.quantize.matrices.quantize_floats", spied)
    checkpoint = make_checkpoint(LLAMA)
    options = ExportOptions(precisions=("quill4",), verify=False)
    resumed = write_bundle(tmp_path / "out", checkpoint, options)
    num_missing = len(made)
    whole = write_bundle(tmp_path / "whole", checkpoint, options)
    assert len(made) == 2 * num_missing + 3, "three matrices were there already"
    assert resumed.files == whole.files
    assert not list(tmp_path.glob(".*.parts"))


def doubting(*precisions: str) -> Stage:
    """As if the proofs of some precisions failed."""

    @contextlib.contextmanager
    def stage(title: str, total: int | None = None) -> Iterator[Tick]:
        yield lambda: None
        if title in [f"{name}: verifying" for name in precisions]:
            raise VerificationError("as if it had been found wrong")

    return stage


def test_a_precision_that_fails_its_proof_is_left_out_in_words(tmp_path: Path) -> None:
    said: list[str] = []
    options = ExportOptions(precisions=("fp32", "quill4"), keep="verified")
    manifest = write_bundle(
        tmp_path / "bundle", make_checkpoint(LLAMA), options, doubting("quill4"), said.append
    )
    assert (manifest.precisions, manifest.left_out) == (("fp32",), ("quill4",))
    assert said == ["Leaving quill4 out: as if it had been found wrong"]
    assert not list((tmp_path / "bundle").glob("*quill4*"))


def test_what_was_asked_for_by_name_must_be_proven_or_nothing_is_left(tmp_path: Path) -> None:
    options = ExportOptions(precisions=("fp32", "quill4"))
    with pytest.raises(
        VerificationError, match=r"found wrong\. Nothing was written\. Export another"
    ):
        write_bundle(tmp_path / "bundle", make_checkpoint(LLAMA), options, doubting("quill4"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("doubted", "kept"), [([], "quill4"), (["quill4"], "fp32")], ids=["good", "not proven"]
)
def test_the_best_is_the_first_that_is_proven(
    doubted: list[str], kept: str, tmp_path: Path
) -> None:
    checkpoint = quantized_at_source(make_checkpoint(LLAMA))
    options = ExportOptions(precisions=("quill4", "fp32"), keep="best")
    said: list[str] = []
    manifest = write_bundle(
        tmp_path / "bundle", checkpoint, options, doubting(*doubted), said.append
    )
    assert manifest.precisions == (kept,)
    assert len(said) == len(doubted)


def test_a_model_as_deep_as_the_default_one_gets_quill4(text: Path, tmp_path: Path) -> None:
    """SmolLM2's layers, KV heads, context and kinds, and narrow: rounded activations differ more in
    every layer, and positions far from the start are compared, too."""
    config = dataclasses.replace(
        LLAMA, num_layers=30, num_heads=6, num_kv_heads=2, context=8192, rotary_base=1e5
    )
    checkpoint = make_checkpoint(config)
    for name, weight_NI in checkpoint.weights.items():
        if weight_NI.ndim == 2 and name != "embedding.weight":
            weight_NI *= 1 / (0.15 * weight_NI.shape[1] ** 0.5)
    said: list[str] = []
    options = ExportOptions(precisions=("quill4", "quill8"), keep="best", text=text)
    manifest = write_bundle(
        tmp_path / "bundle", quantized_at_source(checkpoint), options, report=said.append
    )
    assert (manifest.precisions, manifest.left_out, said) == (("quill4",), (), [])
    verification = manifest.graphs_in("quill4").verification
    assert verification is not None
    assert verification.worst_difference > 0.05  # as much noise as such depth makes


def test_what_no_server_would_take_is_not_the_best(llama: Exported) -> None:
    graphs = llama.manifest.graphs_in("quill4")
    assert graphs.verification is not None
    check_default(graphs)
    worse = dataclasses.replace(
        graphs.verification, perplexity=1.03 * graphs.verification.reference_perplexity
    )
    with pytest.raises(VerificationError, match=r"3\.0% above .* up to 1%"):
        check_default(dataclasses.replace(graphs, verification=worse))
    far = dataclasses.replace(graphs.verification, kl_divergence=0.021)
    with pytest.raises(VerificationError, match=r"KL divergence .* is 0\.021, .* up to 0\.02"):
        check_default(dataclasses.replace(graphs, verification=far))


def test_ctrl_c_leaves_the_old_bundle_in_place(llama: Exported, tmp_path: Path) -> None:
    out = shutil.copytree(llama.directory, tmp_path / "bundle")

    def interrupt(title: str, total: int | None = None) -> contextlib.AbstractContextManager[Tick]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_bundle(out, llama.checkpoint, FP32, interrupt)
    assert list(tmp_path.iterdir()) == [out]
    check_files(out, read_manifest(out))


def test_only_a_bundle_or_an_empty_directory_is_replaced(llama: Exported, tmp_path: Path) -> None:
    check_replaceable(tmp_path / "new")
    check_replaceable(tmp_path)
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(BundleError, match="isn't a bundle, so it isn't replaced"):
        check_replaceable(tmp_path)
    with pytest.raises(BundleError, match="isn't a bundle"):
        check_replaceable(tmp_path / "thesis.txt")
    # A manifest.json is what web pages have, too.
    (tmp_path / MANIFEST_FILE).write_text('{"name": "my app"}', encoding="utf-8")
    with pytest.raises(BundleError, match="isn't a bundle, so it isn't replaced"):
        check_replaceable(tmp_path)
    bundle = shutil.copytree(llama.directory, tmp_path / "bundle")
    (bundle / MANIFEST_FILE).write_text("damaged", encoding="utf-8")
    check_replaceable(bundle)
    (bundle / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(BundleError, match=r"more than its bundle \(notes.txt\), which would be"):
        check_replaceable(bundle)


def test_a_directory_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BundleError, match="can't write the bundle"):
        write_bundle(tmp_path / "file" / "bundle", make_checkpoint(LLAMA), FP32)


def test_exporting_leaves_the_checkpoint_as_it_was(llama: Exported) -> None:
    fresh = make_checkpoint(LLAMA)
    norm = "decoder_norm.weight"
    assert torch.equal(llama.checkpoint.weights[norm], fresh.weights[norm])
    assert {tensor.dtype for tensor in llama.checkpoint.weights.values()} == {torch.float32}
