"""`quill export`, as a person runs it."""

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from quill.__main__ import main
from quill.export import exportability
from quill.export.bundle.manifest import read_manifest
from quill.export.cli import export
from quill.export.cli.cached import parse_precisions
from quill.export.cli.export import with_precisions
from quill.export.errors import ExportError
from quill.export.pipeline import ExportOptions
from quill.model.checkpoint.checkpoint import save_checkpoint
from quill.model.network.config import ModelConfig
from tests.export.tiny import make_checkpoint
from tests.tiny_networks import LLAMA, SEQ2SEQ


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "checkpoint", make_checkpoint(LLAMA))
    return tmp_path / "checkpoint"


def test_export_writes_a_bundle_and_shows_a_table(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle"
    assert main(["export", str(checkpoint), "--out", str(out), "--precision", "fp32"]) == 0
    printed = capsys.readouterr()
    assert "fp32: verifying" in printed.err
    for word in ("fp32", "MB", "KL divergence", "perplexity", "ms a step"):
        assert word in printed.out
    manifest = read_manifest(out)
    assert manifest.precisions == ("fp32",)
    assert manifest.name == "bundle"


def test_export_without_verification_says_so(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(checkpoint), "--out", str(tmp_path / "b"), "--no-verify"]
    assert main([*arguments, "--precision", "fp32"]) == 0
    assert "not verified" in capsys.readouterr().out
    assert read_manifest(tmp_path / "b").graphs[0].verification is None


def test_a_text_that_is_not_there_is_named(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(checkpoint), "--text", "/nope.txt"]) == 1
    assert "can't read --text /nope.txt: No such file" in capsys.readouterr().err


def test_precisions_come_in_a_fixed_order_and_once() -> None:
    assert parse_precisions("quill4, fp32,quill4") == ("fp32", "quill4")
    for wanted, name in (("fp32,", ""), ("fp8", "fp8")):
        known = "there are fp32, quill4, quill8, fp16, all"
        with pytest.raises(ExportError, match=f"unknown precision '{name}'; {known}"):
            parse_precisions(wanted)


class Machine:
    """What `with_precisions` finds where Quill runs, and what it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._set = monkeypatch.setattr
        self.console = Console(record=True, file=io.StringIO(), soft_wrap=True)
        self.has(None, fast=True)

    def has(self, problem: str | None, *, fast: bool) -> None:
        self._set(exportability, "operators_problem", lambda: problem)
        self._set(export, "operators_are_fast", lambda: fast)
        self._set(export, "kernels", lambda _: "avx2")

    def options(
        self, wanted: str | None, config: ModelConfig = LLAMA, existing: tuple[str, ...] = ()
    ) -> tuple[tuple[str, ...], str, str]:
        found = with_precisions(
            ExportOptions(precisions=()), wanted, config, existing, self.console
        )
        return found.precisions, found.keep, self.console.export_text()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_without_a_precision_the_best_for_this_machine_is_made_and_said(machine: Machine) -> None:
    assert machine.options(None) == (
        ("quill4", "quill8", "fp32"),
        "best",
        "Exporting quill4, which a server on this machine chooses (the fastest that is good "
        "enough, with Quill's avx2 kernels)\n",
    )
    assert machine.options(None, SEQ2SEQ)[0][0] == "quill8"


def test_without_operators_nothing_can_be_had_and_it_is_said_why(machine: Machine) -> None:
    machine.has("not built", fast=False)
    with pytest.raises(ExportError, match="nothing can be exported here: not built"):
        machine.options(None)
    with pytest.raises(ExportError, match="nothing can be exported here: not built"):
        machine.options("all")
    with pytest.raises(ExportError, match="fp32 can't be exported here: not built"):
        machine.options("fp32,quill8")


def test_a_translator_is_not_for_cards(machine: Machine) -> None:
    precisions, keep, said = machine.options("all", SEQ2SEQ)
    assert (precisions, keep) == (("fp32", "quill4", "quill8"), "verified")
    assert said.startswith("Leaving fp16 out: a translator has no fp16 graphs")
    with pytest.raises(ExportError, match="fp16 can't be exported here: a translator"):
        machine.options("fp16", SEQ2SEQ)


def test_on_a_processor_without_fast_kernels_they_come_last(machine: Machine) -> None:
    machine.has(None, fast=False)
    precisions, _, said = machine.options(None)
    assert precisions == ("fp32", "quill4", "quill8")
    assert "have no fast kernels for this processor" in said


def test_a_shape_that_cannot_be_cut_into_blocks_is_exported_in_full(machine: Machine) -> None:
    odd = dataclasses.replace(LLAMA, d_ff=100)
    precisions, _, said = machine.options(None, odd)
    assert precisions == ("fp32",)
    assert "d_ff is 100" in said


def test_only_what_is_better_than_what_stands_is_added(machine: Machine) -> None:
    assert machine.options(None, existing=("quill8",))[0] == ("quill4",)
    assert machine.options(None, existing=("fp32", "quill4")) == ((), "best", "")
    assert machine.options("fp32,quill4", existing=("fp32",))[0] == ("quill4",)
    assert "fp32" not in machine.options("all", existing=("fp32",))[0]
