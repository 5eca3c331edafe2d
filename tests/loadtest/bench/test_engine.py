"""The benchmarks of engines, on a small bundle."""

import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from quill.__main__ import main
from quill.loadtest.bench.backends.protocol import BackendInfo
from quill.loadtest.bench.backends.quill_engine import QuillEngine
from quill.loadtest.bench.engine import different_tokens
from quill.loadtest.bench.experiment import Measured
from quill.loadtest.environment.process import ROOT
from quill.loadtest.errors import OptionError
from quill.loadtest.workload.closed_loop import closed_loop
from quill.server.outputs import PromptEvent

PROMPT = list(range(3, 43))
REPEATING = [5, 6, 7, 8, 9, 10] * 4


@pytest.fixture(scope="module")
def engine(bundle: Path) -> QuillEngine:
    return QuillEngine(bundle, "fp32", 1)


def test_engine_measures_prefill_decode_and_sampling(engine: QuillEngine) -> None:
    seconds = [
        engine.prefill(PROMPT),
        engine.decode(PROMPT, 4, 3),
        engine.decode(PROMPT, 4, 3, sampling="sampled"),
        engine.decode(PROMPT, 4, 3, sampling="top-k-p"),
        engine.ragged([PROMPT[:9], PROMPT, PROMPT[:20]], 3),
    ]
    assert all(0 < each < 60 for each in seconds)


def test_engine_scores_every_token_but_the_first(engine: QuillEngine) -> None:
    score = engine.score([PROMPT, PROMPT[:7]])
    assert score.num_tokens == len(PROMPT) - 1 + 6
    parts = [engine.score([PROMPT]), engine.score([PROMPT[:7]])]
    assert score.nll == pytest.approx(sum(part.nll for part in parts))
    assert math.exp(score.nll / score.num_tokens) > 1
    assert score.kld is None


def test_scored_logits_are_those_of_a_request(engine: QuillEngine) -> None:
    engine._submit(prompt_ids=PROMPT, max_new_tokens=0, prompt_logprobs=0)
    logprobs = [e.logprobs for e in engine._finish() if isinstance(e, PromptEvent)]
    total = sum(each.logprob or 0.0 for part in logprobs for each in part)
    assert engine.score([PROMPT]).nll == pytest.approx(-total)


def test_kl_divergence_is_from_the_reference_of_the_same_place(
    engine: QuillEngine, tmp_path: Path
) -> None:
    passages, file = [PROMPT, PROMPT[3:12]], tmp_path / "reference.npy"
    own = [engine._logits(ids)[: len(ids) - 1].copy() for ids in passages]
    np.save(file, np.concatenate(own))
    assert engine.score(passages, str(file)).kld == pytest.approx(0.0, abs=1e-6)
    own[1][2] += np.arange(own[1].shape[1], dtype=np.float32) / 100
    np.save(file, np.concatenate(own))
    found = engine.score(passages, str(file))
    logits_V = engine._logits(passages[1])[2]
    wanted_V, found_V = (_logprobs(each) for each in (own[1][2], logits_V))
    divergence = float((np.exp(wanted_V) * (wanted_V - found_V)).sum())
    assert divergence > 0.01
    assert found.kld == pytest.approx(divergence, rel=1e-3)
    assert found.num_tokens == len(PROMPT) - 1 + 8


def _logprobs(logits_V: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    doubles_V = logits_V.astype(np.float64)
    logprobs_V: npt.NDArray[np.float64] = doubles_V - np.log(np.exp(doubles_V).sum())
    return logprobs_V


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_speculative_decoding_generates_the_same_tokens(
    engine: QuillEngine, bundle: Path, temperature: float
) -> None:
    speculative = QuillEngine(bundle, "fp32", 1, speculative=True)
    plain = engine.generate(REPEATING, 24, temperature, seeds=[1, 2])
    found = speculative.generate(REPEATING, 24, temperature, seeds=[1, 2])
    assert found["answers"] == plain["answers"]
    assert plain["num_draft_tokens"] == 0 <= found["num_accepted"] <= found["num_draft_tokens"]


def test_changed_token_is_a_problem() -> None:
    info = BackendInfo("Quill", "fp32", "1", 1)
    plain = Measured("plain", info, {"a": [{"answers": [[1, 2]]}], "b": [{"answers": [[1]]}]})
    other = Measured("other", info, {"a": [{"answers": [[1, 2]]}], "b": [{"answers": [[2]]}]})
    assert different_tokens([plain, other], "ab") == ["speculative decoding changed tokens: b"]


def test_bench_engine_writes_all_workloads_of_this_and_another_checkout(
    bundle: Path, tmp_path: Path
) -> None:
    options = ["--precision", "fp32", "--threads", "1", "--rounds", "1", "--out", str(tmp_path)]
    options += ["--against", str(ROOT)]
    assert main(["bench", "engine", str(bundle), *options]) == 0
    here, there = json.loads((tmp_path / "engine.json").read_text())["results"]
    decodes = [f"decode {num}" for num in (1, 2, 4, 8, 16, 32)]
    expected = [*decodes, "ragged 8", "sampled 32", "top-k-p 32"]
    assert list(here["turns"]) == expected  # its context is too short for the prefills
    assert (here["label"], there["label"]) == ("Quill fp32", f"Quill fp32, {ROOT.name}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine", "/nowhere"], "there is no file or directory '/nowhere'"),
        (["engine", "BUNDLE", "--against", "/nowhere"], "there is no /nowhere/.venv/bin/python"),
        (["speculative", "BUNDLE"], "give the bundle of a causal model"),
    ],
)
def test_bench_that_cannot_run_says_why(
    words: list[str], message: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(bundle) if word == "BUNDLE" else word for word in words]
    assert main(["bench", *given]) != 0
    assert message in capsys.readouterr().err


def test_closed_loop_users_send_at_the_same_time_until_the_end() -> None:
    together, seen = threading.Barrier(3), set[int]()

    def send(ids: Sequence[int]) -> int:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            together.wait(10)  # passes only if all three send at the same time
        return len(ids)

    served = closed_loop(send, [[1], [1, 2], [1, 2, 3]], 3, 0.05)
    assert len(seen) == 3
    assert 3 <= served.num_requests <= served.num_tokens <= 3 * served.num_requests


def test_an_error_of_one_user_ends_the_closed_loop() -> None:
    def send(ids: Sequence[int]) -> int:
        raise OptionError("no")

    with pytest.raises(OptionError, match="no"):
        closed_loop(send, [[1]], 2, 60.0)
