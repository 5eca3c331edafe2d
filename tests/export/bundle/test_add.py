"""Adding precisions to a bundle that stands."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from quill.export.bundle.add import fingerprint
from quill.export.bundle.manifest import check_files, read_manifest, write_manifest
from quill.export.errors import BundleError
from quill.export.pipeline import ExportOptions, check_existing, write_bundle
from quill.model.checkpoint.checkpoint import Checkpoint
from tests.export.tiny import make_checkpoint, quantized_at_source
from tests.tiny_networks import LLAMA

CHECKPOINT = quantized_at_source(make_checkpoint(LLAMA))
ADD_QUILL4 = ExportOptions(precisions=("quill4",), verify=False, add=True)


@pytest.fixture(scope="module")
def existing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "existing"
    write_bundle(out, CHECKPOINT, ExportOptions(precisions=("fp32",), verify=False))
    return out


@pytest.fixture
def bundle(existing: Path, tmp_path: Path) -> Path:
    shutil.copytree(existing, tmp_path / "bundle")
    return tmp_path / "bundle"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_what_stands_is_kept_byte_for_byte(bundle: Path) -> None:
    before, files = read_manifest(bundle), contents(bundle)
    added = write_bundle(bundle, CHECKPOINT, ADD_QUILL4)
    assert read_manifest(bundle) == added
    assert added.precisions == ("fp32", "quill4")
    assert added.graphs[0] == before.graphs[0]
    assert added.files[: len(before.files)] == before.files
    check_files(bundle, added)
    del files["manifest.json"]
    after = contents(bundle)
    assert {name: after[name] for name in files} == files
    assert set(after) - set(files) == {"manifest.json", "decoder.quill4.onnx", "weights.quill4.bin"}


def other_weights() -> Checkpoint:
    name = "decoder.1.attention.out.weight"
    weights = {**CHECKPOINT.weights, name: CHECKPOINT.weights[name].clone()}
    weights[name][0, 0] += 1e-6
    quantized = {each: kept for each, kept in CHECKPOINT.quantized.items() if each != name}
    return dataclasses.replace(CHECKPOINT, weights=weights, quantized=quantized)


@pytest.mark.parametrize(
    ("checkpoint", "different"),
    [
        (other_weights(), "weights_sha256"),
        (
            dataclasses.replace(CHECKPOINT, config=dataclasses.replace(LLAMA, norm_eps=1e-3)),
            "weights_sha256",
        ),
        (dataclasses.replace(CHECKPOINT, provenance={"licence": "none"}), "provenance"),
        (dataclasses.replace(CHECKPOINT, stop_ids=(3,)), "stop_ids"),
    ],
)
def test_another_checkpoint_is_refused_and_nothing_changes(
    bundle: Path, checkpoint: Checkpoint, different: str
) -> None:
    before = contents(bundle)
    with pytest.raises(BundleError, match=rf"made from another checkpoint \({different} differ"):
        write_bundle(bundle, checkpoint, ADD_QUILL4)
    assert contents(bundle) == before
    assert list(bundle.parent.iterdir()) == [bundle]


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ("onnxruntime", "1.0.0", r"verified with ONNX Runtime 1\.0\.0, and this is"),
        ("weights_sha256", None, "made by an older version of Quill"),
        ("exporter", "0123456789abcdef", "another version of Quill's exporter.* --precision fp32"),
        ("exporter", None, "another version of Quill's exporter"),
    ],
)
def test_a_bundle_of_another_version_is_refused(
    bundle: Path, entry: str, value: Any, words: str
) -> None:
    write_manifest(bundle, dataclasses.replace(read_manifest(bundle), **{entry: value}))
    with pytest.raises(BundleError, match=words):
        write_bundle(bundle, CHECKPOINT, ADD_QUILL4)


def test_a_damaged_bundle_is_not_carried_on(bundle: Path) -> None:
    (bundle / "weights.fp32.bin").write_bytes(b"nonsense")
    with pytest.raises(BundleError, match=r"weights\.fp32\.bin has 8 bytes"):
        write_bundle(bundle, CHECKPOINT, ADD_QUILL4)


def test_a_link_to_a_bundle_stays_one(bundle: Path) -> None:
    link = bundle.parent / "current"
    link.symlink_to(bundle.name)
    write_bundle(link, CHECKPOINT, ADD_QUILL4)
    assert link.is_symlink()
    assert read_manifest(bundle).precisions == ("fp32", "quill4")
    assert set(bundle.parent.iterdir()) == {bundle, link}


def test_nothing_to_add_is_said_only_of_the_same_model_and_whole(bundle: Path) -> None:
    assert check_existing(bundle, CHECKPOINT) == read_manifest(bundle)
    with pytest.raises(BundleError, match="made from another checkpoint"):
        check_existing(bundle, other_weights())
    with pytest.raises(BundleError, match="there is no bundle at"):
        write_bundle(bundle / "nothing", CHECKPOINT, ADD_QUILL4)


def test_weights_have_one_fingerprint_whatever_their_order() -> None:
    def of(**weights: torch.Tensor) -> str:
        return fingerprint(dataclasses.replace(CHECKPOINT, weights=weights, quantized={}))

    ones, zeros = torch.ones(2, 3), torch.zeros(1)
    assert of(a=ones, b=zeros) == of(b=zeros, a=ones) != of(a=ones.mT.contiguous(), b=zeros)
