"""The benchmarks of servers: workloads, sizes, entries and results."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quill.__main__ import build_parser, main
from quill.export.bundle.manifest import read_manifest
from quill.loadtest.bench import server as bench
from quill.loadtest.bench.backends.protocol import BackendInfo
from quill.loadtest.bench.backends.quill_streams import Client, Streams, run_client
from quill.loadtest.bench.experiment import Entry, Measured
from quill.loadtest.bench.server import ServerLoad
from quill.loadtest.environment.process import ROOT
from quill.loadtest.environment.server import StartedServer
from quill.loadtest.errors import BackendError, OptionError
from quill.loadtest.workload.closed_loop import Streamed, run_load
from tests.loadtest.fake_llama_server import make_program
from tests.server.faults import Faults
from tests.server.process import server_process

LOAD = ServerLoad(num_users=4, num_shared=10, num_new=5, context=74, duration_s=0.1)
ALONE = ServerLoad(num_users=4, num_new=5, context=74, duration_s=0.1)


def small(*more: str) -> list[str]:
    options = ["--users", "3", "--duration", "0.3", "--answer", "5", "--context", "40"]
    return [*options, "--precision", "fp32", "--threads", "1", "--rounds", "2", *more]


def test_bench_server_measures_all_protocols_and_checkouts(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = small("--shared-prefix", "20", "--temperature", "1", "--out", str(tmp_path))
    options += ["--protocols", "--against", str(ROOT)]
    assert main(["bench", "server", str(bundle), *options]) == 0
    assert "of weights and KV caches" in capsys.readouterr().out
    results = json.loads((tmp_path / "server.json").read_text())["results"]
    names = ("", f", {ROOT.name}")
    titles = ("gRPC", "HTTP", "KServe v2")
    assert [each["label"] for each in results] == [
        f"Quill over {title}{name}" for title in titles for name in names
    ]
    for each in results:
        turns = each["turns"]["load"]
        assert len(turns) == 2
        assert all(turn["num_tokens"] == 5 * turn["num_requests"] >= 15 for turn in turns)
        assert all(0 < turn["first_token_s"] < turn["seconds"] for turn in turns)
        assert each["peak_bytes"] > 2**20


def test_bench_server_measures_a_peer_and_a_running_server(
    bundle: Path, tmp_path: Path, server: StartedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "LLAMA_SERVER", tmp_path / "llama-server")
    with pytest.raises(OptionError, match="make peers"):
        bench.llama_entry(build_parser().parse_args(["bench", "server"]), LOAD)
    program = make_program(tmp_path / "llama-server")
    (tmp_path / "q8_0.gguf").touch()
    arguments = [str(program), str(tmp_path / "q8_0.gguf"), "1", "3", "40"]
    module = "quill.loadtest.bench.backends.llama_server"
    entry = Entry([sys.executable, "-m", module, *arguments])
    monkeypatch.setattr(bench, "llama_entry", lambda *_: entry)
    options = small("--peers", "--beside", server.address, "--out", str(tmp_path))
    assert main(["bench", "server", str(bundle), *options]) == 0
    results = json.loads((tmp_path / "server.json").read_text())["results"]
    labels = ["Quill over gRPC", f"Quill over gRPC at {server.address}", "llama-server Q8_0"]
    assert [each["label"] for each in results] == labels
    assert results[0]["peak_bytes"] > 2**20 < results[2]["peak_bytes"]
    assert results[1]["peak_bytes"] is None, "the benchmark didn't start it"
    assert all(turn["num_tokens"] >= 15 for each in results for turn in each["turns"]["load"])


def test_expected_memory_is_weights_and_all_kv_caches(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    weights = (bundle / manifest.graphs_in("fp32").weights).stat().st_size
    # Keys and values of 2 layers with 2 heads of 16 numbers of 4 bytes.
    expected = weights + 4 * 74 * 2 * 2 * 2 * 16 * 4
    assert bench.expected_bytes(manifest, "fp32", LOAD) == expected


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    rounds = bench.make_rounds(1000, LOAD, 3)
    prompts = [tuple(prompt) for prompts in rounds for prompt in prompts]
    assert len({prompt[:10] for prompt in prompts}) == 1
    assert len({prompt[10:26] for prompt in prompts}) == len(prompts)
    assert all(0 <= token < 1000 for token in prompts[0])


def test_prompts_have_many_lengths_in_any_order_and_fit() -> None:
    lengths = [len(tail) for tail in bench.make_tails(range(2000), 100)]
    assert min(lengths) == 16
    assert 90 < max(lengths) <= 100
    early = lengths[:32]  # what 32 users send first
    assert max(early) - min(early) > 60
    assert sum(early) / 32 == pytest.approx(sum(lengths) / len(lengths), rel=0.1)
    assert max(map(len, bench.make_tails(range(2000), 10_000))) == 126


def test_each_round_has_prompts_of_its_own_and_the_warm_up_is_short() -> None:
    orders = LOAD.workload(1000, 2).orders
    assert [order["duration_s"] for order in orders] == [bench.WARM_UP_S, 0.1, 0.1]
    assert len({str(order["prompts"]) for order in orders}) == 3


def test_answer_that_is_too_short_ends_the_benchmark() -> None:
    def stream(ids: Sequence[int]) -> Streamed:
        return Streamed(4, 0.1)

    with pytest.raises(BackendError, match="3 tokens was answered with 4 tokens instead of 5"):
        run_load(stream, [[1, 2, 3]], 2, 5, 0.01)


def test_load_is_what_the_options_say() -> None:
    words = ["bench", "server", "--shared-prefix", "1000", "--temperature", "1"]
    assert bench.read_load(build_parser().parse_args(words)) == ServerLoad(
        num_users=32, num_shared=1000, num_new=64, context=1256, temperature=1.0, duration_s=20.0
    )


def test_prefix_caching_is_on_only_where_a_prefix_is_shared() -> None:
    shared, alone = (bench.serve_options(load, "fp32", 100) for load in (LOAD, ALONE))
    assert "--no-prefix-cache" not in shared
    assert "--no-prefix-cache" in alone
    for options in (shared, alone):
        build_parser().parse_args(["serve", *options])


def test_streams_measure_gaps_throughput_and_admission(bundle: Path, tmp_path: Path) -> None:
    """With slow steps: the streams run for 2 s, and no reader is that late."""
    faults = Faults(tmp_path)
    faults.start("slow")

    async def measure(client: Client) -> None:
        begin_s, prompt = time.perf_counter(), [1, 2, 3, 4]
        async with Streams(client, prompt, 4, num_new=100) as streams:
            num_tokens, seconds = await streams.throughput(10)
            assert num_tokens >= 10
            assert seconds > 0
            gaps = streams.gaps(begin_s, time.perf_counter())
            assert len(gaps) == sum(len(each.token_ids) - 1 for each in streams._answers)
            assert streams.gaps(begin_s - 2, begin_s - 1) == []
            sent_s = time.perf_counter()
            waiting = asyncio.create_task(streams.admitted(prompt))
            streams.cancel_one()
            assert sent_s <= await waiting <= time.perf_counter()

    with server_process(bundle, tmp_path / "log", environment=faults.environment) as slow:
        run_client(slow.address, measure)


def test_rows_of_streams_have_the_result_and_all_rounds() -> None:
    def speeds(*seconds: float) -> list[dict[str, float]]:
        return [{"num_tokens": 32, "seconds": each} for each in seconds]

    info, values = BackendInfo("Quill", "fp32", "1", 1), [{"value": 3.0}, {"value": 2.5}]
    turns: dict[str, list[dict[str, Any]]] = dict.fromkeys(
        ("stall", "beside 1", "beside 3"), values
    )
    turns |= {"greedy": speeds(4, 2), "sampled": speeds(4, 4), "cancel": [{"values": [1.0] * 20}]}
    results = [Measured("engine", info, {"greedy": speeds(2, 2)}), Measured("gRPC", info, turns)]
    assert [(row.result, row.more) for row in bench.stream_rows(results)] == [
        ("16", "16 16"),
        ("16", "8 16"),
        ("0.75", "0.50 1.00"),
        ("1.50", "1.00 2.00"),
        *[("2.50", "3.00 2.50")] * 3,
        ("1.00", " ".join(["1.00"] * 20)),
    ]


def test_bench_streams_needs_a_long_context(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "streams", str(bundle)]) == 2
    assert "a context of 4064 is needed" in capsys.readouterr().err
