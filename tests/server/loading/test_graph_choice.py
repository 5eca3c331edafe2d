"""Which device is chosen, and what is said where it can't be had."""

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quill.export.bundle.manifest import Graphs, Manifest
from quill.server.errors import StartError
from quill.server.loading import choices
from quill.server.loading.choices import Choice, choose_graphs
from quill.server.loading.engine_factory import open_bundle, open_engine
from quill.server.loading.loader import load_engine
from quill.server.machine.onnx_session import cuda_free_bytes, cuda_problem
from quill.server.request import Limits
from quill.server.settings import Settings
from tests.server.running import make_manifest
from tests.server.scripted_session import TIMEOUT_S
from tests.server.tiny_bundle import TinyBundle

ROOT = Path(__file__).resolve().parents[3]
PROBLEM = cuda_problem()
without_cuda = pytest.mark.skipif(PROBLEM is None, reason="CUDA works here")

LIMITS = Limits(max_num_seqs=1, context=64, num_blocks=4)


@pytest.fixture(autouse=True)
def slow_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of other precisions is another test's."""
    monkeypatch.setattr(choices, "operators_are_fast", lambda: False)
    monkeypatch.setattr(choices, "ideal", lambda family: "fp32")


def graphs_in(precision: Any, **changes: Any) -> Graphs:
    return dataclasses.replace(make_manifest().graphs[0], precision=precision, **changes)


FOR_BOTH = make_manifest(graphs=(graphs_in("fp32"), graphs_in("fp16", device="cuda")))


def chosen(manifest: Manifest, device: str, precision: str | None, problem: str | None) -> Choice:
    return choose_graphs(manifest, device, precision, lambda: problem)


def test_cuda_is_chosen_where_it_works() -> None:
    for device, precision in (("auto", None), ("cuda", None), ("auto", "fp16"), ("cuda", "fp16")):
        choice = chosen(FOR_BOTH, device, precision, None)
        assert choice.graphs.device == "cuda"
        assert choice.why == ("as chosen" if device == "cuda" else "CUDA works here")


def test_cpu_is_chosen_where_the_bundle_or_the_person_wants_it() -> None:
    translator = dataclasses.replace(FOR_BOTH, family="seq2seq")
    for manifest, device, precision, why in (
        (FOR_BOTH, "cpu", None, "as chosen"),
        (FOR_BOTH, "auto", "fp32", "without CUDA: fp32 is for the CPU"),
        (make_manifest(), "auto", None, "without CUDA: the bundle has no fp16 graphs"),
        (translator, "auto", None, "without CUDA: translation models are served on the CPU only"),
    ):
        choice = chosen(manifest, device, precision, None)
        assert (choice.graphs.device, choice.why) == ("cpu", why)


@pytest.mark.parametrize(
    ("device", "precision", "problem", "words"),
    [
        (
            "cuda",
            None,
            "libcuda.so.1 can't be loaded",
            r"libcuda\.so\.1 can't be loaded\. It takes",
        ),
        ("auto", "fp16", "no card", "CUDA can't be used: no card"),
        ("cuda", "fp32", None, "fp32 is for the CPU"),
        ("cpu", "fp16", None, "fp16 isn't among"),
    ],
)
def test_what_was_asked_for_and_cannot_be_had_is_an_error(
    device: str, precision: str | None, problem: str | None, words: str
) -> None:
    with pytest.raises(StartError, match=words):
        chosen(FOR_BOTH, device, precision, problem)


@without_cuda
def test_auto_names_what_cuda_lacks_here(
    tiny_for_both: TinyBundle, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        load_engine(tiny_for_both.directory, Settings(max_num_seqs=2, threads=1))
    said = [record for record in caplog.records if "CUDA" in record.getMessage()]
    assert [record.levelname for record in said] == ["INFO"]
    name = tiny_for_both.manifest.name
    assert said[0].getMessage() == f"bundle {name}: fp32 on cpu (without CUDA: {PROBLEM})"
    assert capfd.readouterr().out == ""


@without_cuda
def test_server_asked_for_cuda_ends_with_what_is_missing(tiny_for_both: TinyBundle) -> None:
    command = [sys.executable, "-m", "quill", "serve", str(tiny_for_both.directory)]
    run = subprocess.run(
        [*command, "--port", "0", "--device", "cuda"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
    )
    assert (run.returncode, run.stdout) == (1, "")
    (line,) = run.stderr.splitlines()
    assert f"CUDA can't be used: {PROBLEM}. It takes an NVIDIA card" in line


@without_cuda
def test_graphs_for_cuda_are_never_opened_on_the_cpu_in_silence(tiny_for_both: TinyBundle) -> None:
    bundle = open_bundle(tiny_for_both.directory, "fp16")
    with pytest.raises(StartError, match="CUDA provider"):
        open_engine(bundle, LIMITS)


def test_engine_on_cuda_has_no_translations(tiny_translator: TinyBundle) -> None:
    translator = open_bundle(tiny_translator.directory, "fp32")
    graphs = dataclasses.replace(translator.graphs, device="cuda")
    translator = dataclasses.replace(translator, graphs=graphs)
    with pytest.raises(StartError, match="translation models are served on the CPU only"):
        open_engine(translator, LIMITS)


def test_card_has_memory_or_some_is_assumed() -> None:
    assert 2**28 < cuda_free_bytes() < 2**50
