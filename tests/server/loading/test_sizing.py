"""How much is served at once, and on what."""

import dataclasses
from typing import Any

import pytest

from quill.export.bundle.manifest import File, Graphs, Manifest, Verification
from quill.server.errors import StartError
from quill.server.loading import graph_choice
from quill.server.loading.graph_choice import choose_graphs
from quill.server.loading.sizing import MAX_ROWS, Sizing, choose_sizes, choose_threads
from quill.server.machine.resources import num_cores
from tests.server.running import make_manifest

# One token takes 8 bytes, a slot of 200 tokens 1,600.
MANIFEST = make_manifest(files=(File(name="weights", size=1000, sha256=""),))


def sizes(available: int, **wishes: Any) -> Sizing:
    wishes = {"max_rows": None, "context": None, "cache_bytes": None, **wishes}
    return choose_sizes(MANIFEST, MANIFEST.graphs[0], available, **wishes)


def test_slots_take_half_of_what_the_model_leaves() -> None:
    chosen = sizes(1000 + 2 * 5 * 1600)
    assert (chosen.max_rows, chosen.context) == (5, 200)
    assert chosen.cache_bytes == 5 * 1600 // 4
    assert sizes(10**9).max_rows == MAX_ROWS


def test_wishes_are_kept_where_they_fit() -> None:
    chosen = sizes(1000 + 1600, max_rows=2, context=100, cache_bytes=0)
    assert (chosen.max_rows, chosen.context, chosen.cache_bytes) == (2, 100, 0)


@pytest.mark.parametrize(
    "wishes", [{"max_rows": 1000}, {"context": 201}, {"context": 1}], ids=lambda wishes: str(wishes)
)
def test_what_does_not_fit_says_what_to_lower(wishes: dict[str, int]) -> None:
    with pytest.raises(StartError, match=r"--max-slots|--context"):
        sizes(100_000, **wishes)


def test_too_little_memory_for_one_slot_is_an_error() -> None:
    with pytest.raises(StartError, match="Lower --max-slots or --context"):
        sizes(1000)


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
    ("verification", "chosen"), [(proof(20.1), "int4"), (proof(25.0), "fp32"), (None, "fp32")]
)
def test_int4_is_chosen_where_it_is_proven_good(
    verification: Verification | None, chosen: str
) -> None:
    manifest = manifest_with(graphs_in("fp32"), graphs_in("int4", verification=verification))
    assert choose_graphs(manifest, "auto", None).graphs.precision == chosen
    assert choose_graphs(manifest, "cpu", "int4").graphs.precision == "int4"


@pytest.mark.parametrize(
    ("problem", "is_fast", "perplexity", "chosen", "words"),
    [
        (None, True, 20.1, "quill4", None),
        (None, True, 25.0, "int4", "not quill4: its perplexity is too high"),
        (None, False, 20.1, "int4", "not quill4: no fast kernels here"),
        ("not built", False, 20.1, "int4", "not quill4: not built"),
    ],
)
def test_own_operators_are_chosen_where_they_are_built_fast_and_good(
    problem: str | None,
    is_fast: bool,
    perplexity: float,
    chosen: str,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_choice, "operators_problem", lambda: problem)
    monkeypatch.setattr(graph_choice, "operators_are_fast", lambda: is_fast)
    proven = {"fp32": None, "int4": proof(20.1), "quill4": proof(perplexity)}
    manifest = manifest_with(*(graphs_in(name, verification=proven[name]) for name in proven))
    choice = choose_graphs(manifest, "cpu", None)
    assert choice.graphs.precision == chosen
    assert choice.why == ("as asked" if words is None else f"as asked; {words}")
    if problem is None:
        assert choose_graphs(manifest, "cpu", "quill4").graphs.precision == "quill4"
    else:
        with pytest.raises(StartError, match="quill4 can't be had: not built"):
            choose_graphs(manifest, "cpu", "quill4")


@pytest.mark.parametrize(("family", "best"), [("causal", "quill4"), ("seq2seq", "quill8")])
def test_each_family_has_its_best(family: Any, best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_choice, "operators_problem", lambda: None)
    monkeypatch.setattr(graph_choice, "operators_are_fast", lambda: True)
    names = ("fp32", "int4", "quill4", "quill8")
    manifest = manifest_with(*(graphs_in(name, verification=proof(20.1)) for name in names))
    choice = choose_graphs(dataclasses.replace(manifest, family=family), "cpu", None)
    assert (choice.graphs.precision, choice.why) == (best, "as asked")


def test_what_loses_too_much_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_choice, "operators_problem", lambda: None)
    monkeypatch.setattr(graph_choice, "operators_are_fast", lambda: True)
    four, eight = (proof(each) for each in (25.0, 20.01))
    manifest = manifest_with(
        graphs_in("quill4", verification=four), graphs_in("quill8", verification=eight)
    )
    choice = choose_graphs(manifest, "cpu", None)
    assert choice.graphs.precision == "quill8"
    assert choice.why == "as asked; not quill4: its perplexity is too high"


@pytest.mark.parametrize("problem", [None, "not built"])
def test_what_would_be_faster_is_said(problem: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_choice, "operators_problem", lambda: problem)
    monkeypatch.setattr(graph_choice, "operators_are_fast", lambda: problem is None)
    without = choose_graphs(manifest_with(graphs_in("fp32")), "cpu", None).why
    hint = (
        "; not quill4: the bundle has none; add it to the bundle: "
        "quill export CHECKPOINT --out BUNDLE --add --precision quill4"
    )
    assert without == "as asked" + ("" if problem else hint)
    unproven = choose_graphs(manifest_with(graphs_in("fp32"), graphs_in("quill4")), "cpu", None)
    assert unproven.why.endswith(problem or "it was never verified")


def test_a_bundle_whose_graphs_all_need_operators_is_refused_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_choice, "operators_problem", lambda: "not built")
    manifest = manifest_with(graphs_in("quill4"), graphs_in("quill8"))
    with pytest.raises(StartError, match=r"\(quill4, quill8\) can't be run: not built\. Or add"):
        choose_graphs(manifest, "cpu", None)


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
