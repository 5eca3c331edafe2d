"""The benchmark of servers: what is asked, in which turns, and what is told of it."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from quill.__main__ import build_parser, main
from quill.export.bundle.manifest import read_manifest
from quill.loadtest.bench import server as bench
from quill.loadtest.bench.contenders import quill_server
from quill.loadtest.bench.contenders.serving import Load, Serving, Streamed
from quill.loadtest.errors import ContenderError, OptionError
from tests.loadtest.reciting_llama_server import make_program

LOAD = Load(num_users=4, num_shared=10, num_new=5, context=74, temperature=0.0, num_threads=1)


def small(*more: str) -> list[str]:
    options = ["--users", "3", "--duration", "0.3", "--answer", "5", "--context", "40"]
    return [*options, "--precision", "fp32", "--threads", "1", "--rounds", "2", *more]


def test_bench_server_counts_every_token_and_prints_the_memory(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = small("--shared-prefix", "20", "--temperature", "1", "--out", str(tmp_path))
    assert main(["bench", "server", str(bundle), *options]) == 0
    assert "of weights and caches" in capsys.readouterr().out
    record = json.loads((tmp_path / "server.json").read_text())
    assert record["load"]["num_shared"] == 20
    assert record["load"]["context"] == 60
    served = record["servers"]["Quill fp32"]
    assert served["num_requests"] >= 3
    assert served["num_tokens"] == 5 * served["num_requests"]
    assert 0 < served["first_token_s"] < served["seconds"]
    assert served["peak_bytes"] > record["weights_and_caches"]  # of so small a model


def test_bench_server_asks_through_every_door(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = small("--protocols", "--out", str(tmp_path))
    assert main(["bench", "server", str(bundle), *options]) == 0
    said = capsys.readouterr().out
    assert "HTTP / gRPC, tokens/s: " in said
    assert "KServe v2 / gRPC, tokens/s: " in said
    servers = json.loads((tmp_path / "server.json").read_text())["servers"]
    assert list(servers) == ["Quill fp32", "Quill over HTTP fp32", "Quill over KServe v2 fp32"]
    for served in servers.values():
        assert served["num_tokens"] == 5 * served["num_requests"]
        assert served["peak_bytes"] == servers["Quill fp32"]["peak_bytes"]


def test_bench_server_sets_a_peer_beside_it(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = make_program(tmp_path / "llama-server")
    monkeypatch.setattr(bench, "LLAMA_SERVER", program)
    monkeypatch.setattr(bench, "prepare_llama", lambda: tmp_path / "q8_0.gguf")
    options = small("--peers", "--out", str(tmp_path))
    assert main(["bench", "server", str(bundle), *options]) == 0
    servers = json.loads((tmp_path / "server.json").read_text())["servers"]
    assert list(servers) == ["Quill fp32", "llama-server Q8_0"]
    for served in servers.values():
        assert served["num_requests"] >= 3
        assert served["num_tokens"] == 5 * served["num_requests"]
        assert served["peak_bytes"] > 2**20
    assert "llama-server Q8_0" in capsys.readouterr().out


def test_peer_that_is_not_there_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "LLAMA_SERVER", tmp_path / "llama-server")
    with pytest.raises(OptionError, match="make peers"):
        bench.prepare_llama()


def test_what_is_expected_of_memory_is_weights_and_full_slots(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    weights = (bundle / manifest.graphs_in("fp32").weights).stat().st_size
    # Keys and values of 2 layers with 2 heads of 16 numbers of 4 bytes.
    expected = weights + 4 * 74 * 2 * 2 * 2 * 16 * 4
    assert bench.expected_bytes(manifest, "fp32", LOAD) == expected


def test_prompts_share_their_beginning_and_nothing_else() -> None:
    rounds = bench.make_rounds(1000, LOAD, 3)
    prompts = [tuple(prompt) for prompts in rounds for prompt in prompts]
    assert len({prompt[:10] for prompt in prompts}) == 1
    assert len({prompt[10:26] for prompt in prompts}) == len(prompts)
    assert all(0 <= token < 1000 for token in prompts[0])


def test_prompts_have_many_lengths_in_any_order_and_fit() -> None:
    tails = bench.make_tails(range(2000), 100)
    lengths = [len(tail) for tail in tails]
    assert min(lengths) == 16
    assert 90 < max(lengths) <= 100
    early = lengths[:32]  # what 32 users ask first
    assert max(early) - min(early) > 60
    assert sum(early) / 32 == pytest.approx(sum(lengths) / len(lengths), rel=0.1)
    assert max(map(len, bench.make_tails(range(2000), 10_000))) == 126


def test_servers_take_turns_with_the_same_prompts_and_the_best_round_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "PAUSE_S", 0.0)
    monkeypatch.setattr(bench, "WARM_UP_S", 0.02)
    asked: list[tuple[str, int]] = []

    def serving(name: str) -> Serving:
        def stream(ids: Sequence[int]) -> Streamed:
            asked.append((name, ids[0]))
            return Streamed(5, 0.5)

        return Serving(name, "x", os.getpid(), stream)

    rounds = [[[number]] for number in range(3)]
    results = bench.take_turns([serving("a"), serving("b")], LOAD, rounds, 0.02)
    turns = list(dict.fromkeys(asked))
    assert turns == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [each.name for each in results] == ["a x", "b x"]
    for each in results:
        assert each.best.first_token_s == 0.5
        assert each.best.served.num_tokens == 5 * each.best.served.num_requests
        assert each.peak_bytes is not None
        assert each.peak_bytes > 2**20


def test_answer_that_is_too_short_ends_the_benchmark() -> None:
    server = Serving("a", "x", os.getpid(), lambda ids: Streamed(4, 0.1))
    with pytest.raises(ContenderError, match="answered 3 tokens with 4 tokens instead of 5"):
        bench.measure(server, LOAD, [[1, 2, 3]], 0.01)


def test_load_is_what_the_options_say() -> None:
    words = ["bench", "server", "--shared-prefix", "1000", "--threads", "2", "--temperature", "1"]
    load = bench.read_load(build_parser().parse_args(words))
    assert load == Load(
        num_users=32, num_shared=1000, num_new=64, context=1256, temperature=1.0, num_threads=2
    )


def test_quill_keeps_prompts_only_where_they_are_shared() -> None:
    assert "--no-prefix-cache" not in quill_server.options(LOAD, None, 100)
    alone = Load(**vars(LOAD) | {"num_shared": 0})
    words = quill_server.options(alone, "fp32", 100)
    assert "--no-prefix-cache" in words
    for options in (words, quill_server.options(LOAD, None, 100)):
        build_parser().parse_args(["serve", *options])
