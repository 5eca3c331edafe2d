"""`quill doctor`: the verdict, the report, the exit code."""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quill.export.bundle.manifest import read_manifest
from quill.export.operators.library import PLAIN, kernels, library_path
from quill.export.precisions import PRECISIONS, UNROUNDED, Tolerance
from quill.server.doctor import doctor, peaks, probe, speed
from quill.server.doctor.difference import Difference, difference
from quill.server.doctor.doctor import VARIANT, WRONG, Check, judge
from quill.server.doctor.graph_cost import Cost
from quill.server.doctor.probe import Probe
from quill.server.doctor.reference import compute_elsewhere
from quill.server.engine.model_runner import Chunk, ModelOutput, Session
from quill.server.errors import StartError
from quill.server.loading.engine_factory import Bundle, open_bundle
from quill.server.loading.engine_factory import open_session as open_real_session
from quill.server.request import Limits
from tests.operators import needs_operators
from tests.server.running import make_manifest
from tests.server.tiny_bundle import (
    TinyBundle,
    make_tiny_encoder,
    make_tiny_hybrid,
    make_tiny_recurrent,
    make_tiny_translator,
)

pytestmark = needs_operators


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds that nobody looks at take no time."""
    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setattr(speed, "TURN_S", 0.0)
    monkeypatch.setattr(peaks, "READ_BYTES", peaks.MIN_READ_BYTES)
    monkeypatch.setattr(peaks, "MULTIPLY_S", 0.001)


def run(source: Path | None, precision: str | None = None, report: Path | None = None) -> None:
    doctor.run(
        argparse.Namespace(
            source=None if source is None else str(source),
            device="cpu",
            precision=precision,
            threads=1,
            json=report,
        )
    )


@pytest.mark.usefixtures("quick")
def test_a_sound_bundle_gets_a_verdict_and_a_report(
    tiny_bundle: TinyBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny_bundle.directory, "quill4", tmp_path / "report.json")
    shown = capsys.readouterr()
    assert shown.out.rstrip().endswith("Sound: right, and batch-invariant.")
    assert "measuring speed, 1 of 1" in shown.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert str(tmp_path) not in json.dumps(report)
    assert report["bundle"]["precision"] == "quill4"
    names = [check["name"] for check in report["checks"]]
    reference = ["plain kernels"]
    assert names[:4] == [*reference, "fp32 graphs", "chunked prefill", "decode"]
    assert names[4:] == [f"batch of {num}" for num in (1, 2, 3, 8)]
    assert all(check["right"] and check["same"] for check in report["checks"])
    assert list(report["speed"]) == ["decode 1", "decode 8", "decode 32", "prefill 128"]
    assert all(each["tokens_s"] > 0 for each in report["speed"].values())
    assert report["verdict"]["exit_code"] == 0


@pytest.mark.usefixtures("quick")
def test_without_a_bundle_only_the_machine_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(None, report=tmp_path / "report.json")
    assert "multiplying 8 bits" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["speed"] == {}
    assert "checks" not in report


class Disturbed:
    """A session whose logits depend on how many sequences are in a step."""

    def __init__(self, session: Session, by: float) -> None:
        self._session = session
        self._by = by

    def step(self, chunks: Sequence[Chunk]) -> ModelOutput:
        output = self._session.step(chunks)
        logits_LV = np.array(output.logits_LV)
        logits_LV[:, 0] += self._by * (len(chunks) - 1)
        return output._replace(logits_LV=logits_LV)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("by", "code"), [(1e-6, VARIANT), (10.0, WRONG)])
def test_neighbours_that_change_results_are_seen(
    tiny_bundle: TinyBundle,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    by: float,
    code: int,
) -> None:
    def open_session(bundle: Bundle, limits: Limits, *options: Any) -> Any:
        return Disturbed(open_real_session(bundle, limits, *options), by)

    monkeypatch.setattr(probe, "open_session", open_session)
    with pytest.raises(SystemExit) as ended:
        run(tiny_bundle.directory, "fp32")
    assert ended.value.code == code
    assert "batch of 8" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.usefixtures("quick")
def test_results_that_differ_from_plain_kernels_are_wrong(
    tiny_bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compute(*given: Any) -> Any:
        found = compute_elsewhere(*given)
        found[-1, -1] = np.nextafter(found[-1, -1], np.float32(np.inf))
        return found

    if kernels(library_path()) == PLAIN:
        pytest.skip("this processor has no other kernels")
    monkeypatch.setattr(doctor, "compute_elsewhere", compute)
    with pytest.raises(SystemExit) as ended:
        run(tiny_bundle.directory, "fp32")
    assert ended.value.code == WRONG
    assert "(plain kernels)" in capsys.readouterr().out


def make_recurrent(directory: Path) -> TinyBundle:
    return make_tiny_recurrent(directory, "gru", "bahdanau", ("fp32",))


@pytest.mark.parametrize(
    "make", [make_tiny_translator, make_tiny_encoder, make_tiny_hybrid, make_recurrent]
)
def test_all_families_can_be_checked(make: Any, tmp_path: Path) -> None:
    bundle = make(tmp_path / "bundle")
    probed = Probe(open_bundle(bundle.directory, "fp32"), 1)
    whole = probed.whole(60)
    assert whole.std() > 0
    if not probed.is_encoder:
        assert difference(probed.chunked(60), np.tile(whole, (probe.NUM_CUTS, 1))).worst == 0
        assert difference(probed.decoded(60, 40), whole).worst == 0
    batches = list(probed.batched())
    assert [num for num, _, _ in batches] == [1, 2, 3, 8]
    assert all(np.array_equal(found, together) for _, found, together in batches)
    for work in speed.works_of(probed, Cost(1, 1, 1), 1):
        work.step()


def test_another_process_says_why_it_cant_compute(tiny_bundle: TinyBundle) -> None:
    with pytest.raises(StartError, match=r"with plain kernels: .*no fp16"):
        compute_elsewhere(tiny_bundle.directory, "fp16", 8, 1, PLAIN)


def check(worst: float, allowed: Tolerance, *, same: bool = True) -> Check:
    return Check("batch of 2", Difference(1, worst, worst, 1.0), allowed, same)


@pytest.mark.parametrize(
    ("worst", "code"), [(0.0, 0), (1e-4, VARIANT), (0.02, WRONG), (math.nan, WRONG)]
)
def test_a_verdict_is_by_the_worst_of_all_checks(worst: float, code: int) -> None:
    graphs, allowed = make_manifest().graphs[0], Tolerance(0.01, 0.01)
    sound = check(0.0, allowed)
    assert judge([sound, check(worst, allowed), sound], graphs).exit_code == code


def test_a_reference_may_differ_within_the_tolerance() -> None:
    graphs = make_manifest().graphs[0]
    assert judge([check(0.005, Tolerance(0.01, 0.01), same=False)], graphs).exit_code == 0


def test_what_couldnt_be_compared_is_said() -> None:
    found = judge(
        [Check("reference", None, UNROUNDED, False, "no graphs")], make_manifest().graphs[0]
    )
    assert found.exit_code == 0
    assert "Not everything" in found.words


def test_a_card_is_compared_with_the_cpus_best_graphs(tiny_for_both: TinyBundle) -> None:
    manifest = read_manifest(tiny_for_both.directory)
    on_card = manifest.graphs_in("fp16")
    [(name, precision, _, _, allowed)] = doctor._references(manifest, on_card)
    assert (name, precision) == ("fp32 on the CPU", "fp32")
    assert allowed == PRECISIONS["fp16"].tolerance
    rounded = dataclasses.replace(manifest.graphs_in("fp32"), precision="quill8")
    other = dataclasses.replace(manifest, graphs=(rounded, on_card))
    [(_, precision, _, _, allowed)] = doctor._references(other, on_card)
    assert (precision, allowed) == ("quill8", UNROUNDED)
    alone = dataclasses.replace(manifest, graphs=(on_card,))
    [(_, precision, why, _, _)] = doctor._references(alone, on_card)
    assert not precision
    assert "--add --precision fp32" in why


def test_a_report_that_cant_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="can't write"):
        doctor._write(tmp_path / "no" / "report.json", {})


def test_json_has_no_infinity(tmp_path: Path) -> None:
    doctor._write(tmp_path / "report.json", {"a": [math.inf, math.nan, 1.5]})
    assert json.loads((tmp_path / "report.json").read_text()) == {"a": ["inf", "nan", 1.5]}
