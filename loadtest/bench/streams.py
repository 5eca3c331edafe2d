"""`quill bench streams`: what people at the other end of many streams notice.

Knows: `quill serve`, the wire, the bare engine as a contender. Does not know: what makes it slow.

Each within one run, the best of several rounds in turns: tokens through gRPC against the bare
engine; sampled against greedy; gaps between tokens while a long prompt is read against before; how
long a short prompt waits while long ones are read; and how many steps pass until a cancelled
stream's row serves somebody else.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from quill.export.bundle.manifest import read_manifest
from quill.loadtest.bench.contest import PAUSE_S, Running, running
from quill.loadtest.bench.models import default_bundle
from quill.loadtest.bench.stream_clients import StreamClients
from quill.loadtest.bench.tasks import PAST_TOKENS, random_ids
from quill.loadtest.environment.machine import machine_facts, num_cores
from quill.loadtest.environment.own_server import own_server
from quill.loadtest.errors import LoadtestError, OptionError
from quill.server.loading.choices import choose_graphs

NUM_STEPS = 32
WARM_STEPS = 4
SHORT_PROMPT = 20
NUM_LONG = (1, 3)  # prompts that are read while a short one comes
NUM_CANCELS = 8
NUM_NEW = 4000  # of each stream: more than anybody waits for
GREEDY: dict[str, Any] = {"temperature": 0.0}
CHAT: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


@dataclass
class Findings:
    """All rounds; what counts is the best of each."""

    bare: list[float] = field(default_factory=list)  # tokens a second
    greedy: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)  # p95 gap while a prompt is read / without
    short: dict[int, list[float]] = field(  # seconds to its first token, by how many long ones
        default_factory=lambda: {num: [] for num in NUM_LONG}
    )
    cancel: list[float] = field(default_factory=list)  # steps until the row is somebody else's


def run(args: argparse.Namespace) -> None:
    bundle = args.bundle or default_bundle()
    manifest = read_manifest(bundle)
    context = max(args.long_prompt, NUM_NEW) + PAST_TOKENS
    if manifest.family != "causal" or manifest.sizes.context < context:
        raise OptionError(f"{bundle}: a causal model with a context of {context} is needed")
    precision = choose_graphs(manifest, "cpu", args.precision).graphs.precision
    threads = str(args.threads or num_cores())
    found = Findings()
    options = [
        "--precision",
        precision,
        "--max-num-seqs",
        str(args.streams),
        "--context",
        str(context),
    ]
    options += ["--threads", threads, "--no-prefix-cache", "--no-speculative"]
    command = [
        sys.executable,
        "-m",
        "quill.loadtest.bench.contenders.quill",
        str(bundle),
        precision,
        threads,
    ]
    ids = random_ids(args.long_prompt + max(NUM_LONG), manifest.sizes.vocab_size)
    _say("starting the server and the bare engine")
    with (
        tempfile.TemporaryDirectory() as logs,
        own_server(Path(logs) / "server.log", bundle, *options) as server,
        running(command, Path(logs) / "engine.log") as engine,
    ):
        for number in range(args.rounds):
            _say(f"round {number + 1} of {args.rounds}")
            _bare(found, engine, ids, args.streams)
            asyncio.run(_round(found, server.address, ids, args.streams))
    Console(highlight=False).print(_table(found, precision, args.streams))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {"facts": machine_facts(), "precision": precision, "found": asdict(found)}
        (args.out / "streams.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def _bare(found: Findings, engine: Running, ids: Sequence[int], num_rows: int) -> None:
    _say(f"  bare engine: {num_rows} rows, {NUM_STEPS} steps")
    time.sleep(PAUSE_S)  # the server's threads fall asleep
    order = {"do": "decode", "ids": list(ids[:PAST_TOKENS]), "num_rows": num_rows}
    seconds = engine.ask(order | {"num_steps": NUM_STEPS})["seconds"]
    found.bare.append(num_rows * NUM_STEPS / seconds)


async def _round(found: Findings, address: str, ids: Sequence[int], num_streams: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.sleep(PAUSE_S)  # the engine's threads fall asleep
        prompt = ids[:PAST_TOKENS]
        for name, rates, options in (
            ("greedy", found.greedy, GREEDY),
            ("sampled", found.sampled, CHAT),
        ):
            _say(f"  through gRPC, {name}: {num_streams} streams, {NUM_STEPS} steps")
            async with StreamClients(channel, prompt, num_streams, options, NUM_NEW) as crowd:
                await crowd.wait_for_steps(WARM_STEPS)
                rates.append(await crowd.rate(NUM_STEPS))
        long = ids[max(NUM_LONG) :]
        _say(f"  a prompt of {len(long)} tokens among {num_streams // 2} streams")
        async with StreamClients(channel, prompt, num_streams // 2, GREEDY, NUM_NEW) as crowd:
            await crowd.wait_for_steps(WARM_STEPS)
            found.stall.append(await _stall(crowd, long))
        for num, seconds in found.short.items():
            _say(f"  a prompt of {SHORT_PROMPT} tokens beside {num} of {len(long)}")
            seconds.append(await _short(channel, [ids[i : i + len(long)] for i in range(num)]))
        _say(f"  {NUM_CANCELS} cancelled streams make room")
        async with StreamClients(channel, prompt, num_streams, GREEDY, NUM_NEW) as crowd:
            await crowd.wait_for_steps(WARM_STEPS)
            found.cancel += [await _steps_to_leave(crowd, prompt) for _ in range(NUM_CANCELS)]


async def _stall(crowd: StreamClients, ids: Sequence[int]) -> float:
    """The 95th percentile of gaps that end while a long prompt is read, against before and after:
    meanwhile the streams themselves have grown longer."""
    times_s = [time.perf_counter()]
    await crowd.wait_for_steps(NUM_STEPS)
    times_s.append(time.perf_counter())
    await crowd.first_token(ids)
    times_s.append(time.perf_counter())
    await crowd.wait_for_steps(NUM_STEPS)
    times_s.append(time.perf_counter())
    before, during, after = (
        float(np.percentile(crowd.gaps(begin_s, end_s), 95))
        for begin_s, end_s in itertools.pairwise(times_s)
    )
    return 2 * during / (before + after)


async def _short(channel: grpc.aio.Channel, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds to the first token of somebody who comes while long prompts are read."""
    clients = StreamClients(channel, (), 0, GREEDY, 0)
    reading = [asyncio.create_task(clients.first_token(prompt)) for prompt in prompts]
    await asyncio.sleep(PAUSE_S)
    begin_s = time.perf_counter()
    await clients.first_token(prompts[0][-SHORT_PROMPT:])
    waited_s = time.perf_counter() - begin_s
    if any(task.done() for task in reading):
        raise LoadtestError("the long prompts were read too soon: give a longer --long-prompt")
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    return waited_s


async def _steps_to_leave(crowd: StreamClients, prompt: Sequence[int]) -> float:
    """All rows are taken and one more request waits; then a stream is cancelled."""
    waiting = asyncio.create_task(crowd.started(prompt))
    await crowd.wait_for_steps(2)
    begin_s = time.perf_counter()
    crowd.cancel_one()
    started_s = await waiting
    await crowd.wait_for_steps(2)
    step_s = float(np.median(crowd.gaps(begin_s - 1.0, time.perf_counter())))
    return (started_s - begin_s) / step_s


def _say(text: str) -> None:
    """What is under way. Before each measurement, never in the middle of one."""
    print(text, file=sys.stderr, flush=True)


def _table(found: Findings, precision: str, num_streams: int) -> Table:
    table = Table(title=f"{precision}, {num_streams} streams", box=box.SIMPLE_HEAD)
    for name in ("", "bar", "seen", "all rounds"):
        table.add_column(name, justify="left" if not name else "right")
    through = [ours / bare for ours, bare in zip(found.greedy, found.bare, strict=True)]
    slower = [slow / fast for slow, fast in zip(found.greedy, found.sampled, strict=True)]
    table.add_row("tokens/s: bare engine", "", f"{max(found.bare):.0f}", _all(found.bare, 0))
    table.add_row("tokens/s: through gRPC", "", f"{max(found.greedy):.0f}", _all(found.greedy, 0))
    ratio = max(found.greedy) / max(found.bare)
    table.add_row("gRPC / bare engine", "≥ 0.9", f"{ratio:.2f}", _all(through))
    ratio = max(found.greedy) / max(found.sampled)
    table.add_row("sampled / greedy, time", "≤ 1.05", f"{ratio:.3f}", _all(slower))
    table.add_row("p95 gap, long prompt", "≤ 2", f"{min(found.stall):.2f}", _all(found.stall))
    for num, seconds in found.short.items():
        name = f"first token beside {num} long prompts, s"
        table.add_row(name, "≤ 1", f"{min(seconds):.2f}", _all(seconds))
    cancel = float(np.percentile(found.cancel, 95))
    spread = f"median {np.median(found.cancel):.2f} of {len(found.cancel)}"
    table.add_row("cancel, p95 in steps", "≤ 2", f"{cancel:.2f}", spread)
    return table


def _all(numbers: Sequence[float], digits: int = 2) -> str:
    return " ".join(f"{number:.{digits}f}" for number in numbers)
