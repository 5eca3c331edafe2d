"""Quill beside its peers: which of them run, and which is the best at equal quality."""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from quill.__main__ import main
from quill.loadtest.bench import peers
from quill.loadtest.bench.backends.prepare import MAKERS
from quill.loadtest.bench.contest import QUILL, contest
from quill.loadtest.bench.engine import decode
from quill.loadtest.bench.experiment import Entry, Workload, run_experiment
from quill.loadtest.bench.peers import PEERS, PeersModel, chosen_peers, peers_model, prepare_peers
from quill.loadtest.bench.report import table_cells
from quill.loadtest.errors import OptionError

SCORE = Workload("score", [{"do": "score", "passages": [[1, 2, 3]]}], once=True)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeersModel:
    """One that was fetched, and of which nothing was made."""
    file = tmp_path / "models" / "qwen" / "qwen-instruct-q4_k_m.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setenv("QUILL_CACHE", str(tmp_path))
    monkeypatch.setattr(peers, "PEERS_PYTHON", tmp_path / "peers-venv" / "bin" / "python")
    return peers_model("qwen")


def install(*environments: str) -> None:
    """An interpreter that makes nothing."""
    for each in environments:
        python = peers.python_of(each)
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\nexit 1\n")
        python.chmod(0o755)


def made(model: PeersModel, *files: str) -> None:
    for file in files:
        (model.directory / file).mkdir(parents=True)


def test_every_peer_names_a_module_and_a_file_that_can_be_made(model: PeersModel) -> None:
    for peer in PEERS:
        command = peer.entry(model, "2").command
        assert find_spec(command[2]) is not None
        assert command[5] == "2"
        assert peer.file in {*MAKERS, peers.HUGGING_FACE, ""}
    labels = [peer.entry(model, "2").label for peer in PEERS]
    assert len({*labels}) == len(PEERS)
    assert {"llama.cpp Q4_K_M", "ik_llama.cpp Q4_K_M repacked"} <= {*labels}


def test_peers_that_cannot_run_are_skipped_in_words(
    model: PeersModel, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OptionError, match="make peers"):
        prepare_peers(model, PEERS)
    install("")
    made(model, peers.HUGGING_FACE, "genai-int4")
    ready = [(peer.name, peer.kind) for peer in prepare_peers(model, PEERS)]
    assert ready == [
        ("ik_llama.cpp", ""),
        ("ik_llama.cpp", ""),
        ("llama.cpp", ""),
        ("onnxruntime-genai", "int4"),
        ("transformers", "float32"),
    ]
    said = capfd.readouterr().err
    assert "skipped vllm bfloat16: it isn't installed (make peers-vllm)" in said
    assert "skipped openvino int8: what makes its file isn't installed (make peers)" in said
    assert "skipped llama.cpp Q8_0: q8_0.gguf couldn't be made" in said


def test_more_weights_than_memory_are_an_error(
    model: PeersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("")
    made(model, peers.HUGGING_FACE)
    monkeypatch.setattr(peers, "memory_gib", lambda: 0.0)
    (model.path(peers.HUGGING_FACE) / "model.safetensors").write_bytes(b"12345")
    with pytest.raises(OptionError, match="Choose some by --peers"):
        prepare_peers(model, chosen_peers("transformers"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peers", "nobody"], "unknown peer 'nobody'; there are openvino, ik_llama.cpp"),
        (["--resume"], "--resume needs --out"),
    ],
)
def test_contest_that_cannot_run_says_why(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "peers", *words]) != 0
    assert message in capsys.readouterr().err


def test_model_that_was_not_fetched_is_an_error_that_says_how(model: PeersModel) -> None:
    with pytest.raises(OptionError, match="`quill import gemma` fetches it"):
        peers_model("gemma")


def fake(name: str, seconds: str) -> Entry:
    return Entry([sys.executable, "-m", "tests.loadtest.fake_backend", name, seconds])


def test_the_best_peer_is_the_fastest_that_is_near_enough_to_the_reference() -> None:
    entries = [
        fake(f"{QUILL}~0.001", "2"),
        fake("good~0.02", "4"),
        fake("slow~0.0", "8"),
        fake("lossy~0.021", "1"),
        fake("unknown", "0.5"),
    ]
    experiment = contest("fake", entries, [decode(range(64), 8), SCORE], 1)
    results = run_experiment(experiment)
    for number, result in enumerate(results):
        result.peak_bytes = (number + 1) * 1_000_000
    cells = table_cells(experiment, results)
    assert [column.name for column in experiment.columns] == [
        *("", "decode 8", "peak MB", "perplexity", "KLD", "weights MB", "version"),
    ]
    assert cells[0] == ["Quill none", "16", "1", "7.389", "0.0010", "7", "1"]
    assert cells[4][4] == "–"  # no KL divergence, so it can't be the best
    assert cells[-2] == ["best peer", "good none", "good none", "", "", "", ""]
    assert cells[-1] == ["Quill none ÷ best peer", "2.00", "0.50", "", "", "", ""]


def test_without_peers_that_are_near_enough_there_is_no_best_one() -> None:
    entries = [fake(f"{QUILL}~0.001", "2"), fake("lossy~0.5", "1")]
    experiment = contest("fake", entries, [decode(range(64), 8), SCORE], 1)
    cells = table_cells(experiment, run_experiment(experiment))
    assert [row[1] for row in cells] == ["16", "32", "–", "–"]
    assert not np.isnan(float(cells[0][4]))
