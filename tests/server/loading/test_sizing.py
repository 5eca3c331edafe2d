"""How much is served at once, and on what."""

import dataclasses
from typing import Any

import pytest

from quill.export.bundle.manifest import File, Graphs, Manifest, Verification
from quill.server.errors import StartError
from quill.server.loading import choices
from quill.server.loading.choices import (
    MAX_CACHE_BYTES,
    MAX_NUM_SEQS,
    choose_graphs,
    choose_limits,
    choose_threads,
)
from quill.server.machine.resources import num_cores
from quill.server.request import Limits
from quill.server.settings import Settings
from tests.server.running import make_manifest

MB = 2**20
# With one MB a block.
SIZES = dataclasses.replace(
    make_manifest().sizes, num_layers=16, num_kv_heads=8, head_size=64, value_size=64
)
MANIFEST = make_manifest(sizes=SIZES, files=(File(name="weights", size=1000, sha256=""),))
LEAST = 13  # blocks, for a context of 200


def limits(available: int, **options: Any) -> Limits:
    return choose_limits(MANIFEST, MANIFEST.graphs[0], available, Settings(**options))


def test_blocks_take_half_of_what_the_model_leaves_up_to_a_limit() -> None:
    chosen = limits(1000 + 2 * 20 * MB)
    assert (chosen.max_num_seqs, chosen.context, chosen.num_blocks) == (MAX_NUM_SEQS, 200, 20)
    assert limits(10**12).num_blocks == MAX_CACHE_BYTES // MB


def test_options_are_kept_where_they_fit() -> None:
    chosen = limits(1000 + 7 * MB, max_num_seqs=2, context=100, kv_cache_mb=7)
    assert (chosen.max_num_seqs, chosen.context, chosen.num_blocks) == (2, 100, 7)


@pytest.mark.parametrize(
    "options",
    [
        {"context": 201},
        {"context": 1},
        {"kv_cache_mb": LEAST - 1},
        {"kv_cache_mb": 101},
    ],
    ids=str,
)
def test_what_does_not_fit_says_what_to_change(options: dict[str, int]) -> None:
    with pytest.raises(StartError, match=r"--context"):
        limits(100 * MB, **options)


def test_too_little_memory_for_one_sequence_is_an_error() -> None:
    with pytest.raises(StartError, match="smaller --kv-cache-mb or --context"):
        limits(1000)


def graphs_in(precision: Any, **changes: Any) -> Graphs:
    return dataclasses.replace(MANIFEST.graphs[0], precision=precision, **changes)


def proof(perplexity: float) -> Verification:
    return Verification(
        worst_difference=0.0,
        greedy_agreement=1.0,
        perplexity=perplexity,
        reference_perplexity=20.0,
        text="",
        num_tokens=1,
        step_ms=1.0,
    )


def manifest_with(*graphs: Graphs) -> Manifest:
    return make_manifest(graphs=graphs)


@pytest.mark.parametrize(
    ("verification", "chosen"), [(proof(20.1), "quill4"), (proof(25.0), "fp32"), (None, "fp32")]
)
def test_quill4_is_chosen_where_it_is_proven_good(
    verification: Verification | None, chosen: str
) -> None:
    manifest = manifest_with(graphs_in("fp32"), graphs_in("quill4", verification=verification))
    assert choose_graphs(manifest, "auto", None).graphs.precision == chosen
    assert choose_graphs(manifest, "cpu", "quill4").graphs.precision == "quill4"


@pytest.mark.parametrize(("family", "best"), [("causal", "quill4"), ("seq2seq", "quill8")])
def test_each_family_has_its_best(family: Any, best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "operators_problem", lambda: None)
    monkeypatch.setattr(choices, "operators_are_fast", lambda: True)
    names = ("fp32", "quill4", "quill8")
    manifest = manifest_with(*(graphs_in(name, verification=proof(20.1)) for name in names))
    choice = choose_graphs(dataclasses.replace(manifest, family=family), "cpu", None)
    assert (choice.graphs.precision, choice.why) == (best, "as chosen")


def test_what_loses_too_much_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "operators_problem", lambda: None)
    monkeypatch.setattr(choices, "operators_are_fast", lambda: True)
    four, eight = (proof(each) for each in (25.0, 20.01))
    manifest = manifest_with(
        graphs_in("quill4", verification=four), graphs_in("quill8", verification=eight)
    )
    choice = choose_graphs(manifest, "cpu", None)
    assert choice.graphs.precision == "quill8"
    assert choice.why == "as chosen; not quill4: its perplexity is too high"


def test_what_would_be_faster_is_said() -> None:
    without = choose_graphs(manifest_with(graphs_in("fp32")), "cpu", None).why
    assert without == (
        "as chosen; not quill4: the bundle has none; add it to the bundle: "
        "quill export SOURCE --out BUNDLE --add --precision quill4"
    )
    unproven = choose_graphs(manifest_with(graphs_in("fp32"), graphs_in("quill4")), "cpu", None)
    assert unproven.why.endswith("it was never verified")


@pytest.mark.parametrize("precision", [None, "fp32"])
def test_nothing_is_served_on_the_cpu_without_operators(
    precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "operators_problem", lambda: "not built")
    with pytest.raises(StartError, match="nothing can be served on the CPU: not built"):
        choose_graphs(manifest_with(graphs_in("fp32")), "cpu", precision)


def test_what_cannot_be_had_is_an_error() -> None:
    with pytest.raises(StartError, match="--device cpu"):
        choose_graphs(MANIFEST, "cuda", None)
    with pytest.raises(StartError, match=r"quill8 isn't among .* \(fp32\)\. .*--add"):
        choose_graphs(MANIFEST, "cpu", "quill8")
    with pytest.raises(StartError, match="no graphs for the CPU"):
        choose_graphs(manifest_with(graphs_in("fp16", device="cuda")), "auto", None)


def test_more_threads_than_cores_are_refused() -> None:
    assert choose_threads(None) == num_cores()
    assert choose_threads(1) == 1
    with pytest.raises(StartError, match="--threads is 100000; this process may use"):
        choose_threads(100_000)
