"""`quill bench affinity`: what it gains that requests meet the server that knows their beginning.

Knows: servers of our own, the scenario system-prompts, who was better. Does not know: how a server
is chosen.

The same requests are asked by closed-loop users with each way to balance, in turns, and every time
of servers that are new, and so know nothing. What one keeps (--kv-cache-mb) is less than all
system prompts together: where every server can keep all of them, all of them soon do, and it
matters no more who is asked.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from quill.loadtest.bench.contest import PAUSE_S
from quill.loadtest.environment.machine import machine_facts
from quill.loadtest.environment.own_server import OwnServer, own_server
from quill.loadtest.environment.server_metrics import read_tokens
from quill.loadtest.errors import ContenderError
from quill.loadtest.protocols.fleet_door import FleetDoor
from quill.loadtest.protocols.grpc_door import GrpcDoor
from quill.loadtest.workload.ask import Facts
from quill.loadtest.workload.call import call
from quill.loadtest.workload.closed_loop import IsOver, run_users
from quill.loadtest.workload.records import RequestRecord
from quill.loadtest.workload.scenarios import make_ask
from quill.server.client.target import Balance

SCENARIO = "system-prompts"
CONTENDERS: tuple[Balance, ...] = ("round-robin", "affinity")
# What affinity is held to, against round robin.
LEAST_HITS, MOST_LOAD = 2.0, 1.5


@dataclass(frozen=True)
class Measured:
    """One way to balance, once."""

    balance: str
    seconds: float
    num_prompt: int
    num_cached: int
    num_generated: int
    first_token_ms: float  # the median
    requests: tuple[int, ...]  # by server
    computed: tuple[int, ...]  # by server: tokens that were read or made

    @property
    def hit_rate(self) -> float:
        return self.num_cached / self.num_prompt

    @property
    def tokens_a_second(self) -> float:
        return self.num_generated / self.seconds

    @property
    def imbalance(self) -> float:
        """The most loaded server's share of the mean, by requests or by tokens: the worse one."""
        return max(max(each) / statistics.mean(each) for each in (self.requests, self.computed))


def run(args: argparse.Namespace) -> None:
    measured: dict[str, list[Measured]] = {balance: [] for balance in CONTENDERS}
    console = Console(highlight=False)
    for number in range(args.rounds):
        for balance in CONTENDERS:
            time.sleep(PAUSE_S)
            found = measure(args, balance, seed=args.seed + number)
            measured[balance].append(found)
            console.print(_describe(found))
    console.print(_table(measured))
    console.print(_verdict(measured))
    if args.out is not None:
        _write(measured, args.out)


def measure(args: argparse.Namespace, balance: Balance, seed: int) -> Measured:
    options = ["--threads", str(args.threads), "--http-port", "off"]
    options += ["--kv-cache-mb", str(args.kv_cache_mb), "--context", str(args.context)]
    options += ["--precision", args.precision] if args.precision else []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        servers = [
            stack.enter_context(
                own_server(Path(directory, f"server-{number}.log"), args.bundle, *options)
            )
            for number in range(args.servers)
        ]
        with closing(GrpcDoor(servers[0].address)) as first:
            facts = Facts.of(first.get_model())
        listed = ",".join(each.address for each in servers)
        door = stack.enter_context(closing(FleetDoor(f"quill://{listed}?balance={balance}")))
        begin_s = time.perf_counter()
        records = ask_all(door, facts, seed, args.requests, args.users)
        return _measured(balance, time.perf_counter() - begin_s, records, servers, door)


def ask_all(
    door: FleetDoor, facts: Facts, seed: int, num_requests: int, num_users: int
) -> list[RequestRecord]:
    """Each user takes the next request when it has its answer."""
    records: list[RequestRecord] = []
    numbers = itertools.count()

    def user(_: int, is_over: IsOver) -> None:
        while not is_over() and (index := next(numbers)) < num_requests:
            ask = make_ask(SCENARIO, seed, index, facts)
            record = call(door, ask, time.monotonic()).record(ask, index, SCENARIO, time.time())
            if not record.ok:
                raise ContenderError(f"request {index} ended with {record.status}")
            records.append(record)

    run_users(user, num_users)
    return records


def _measured(
    balance: Balance,
    seconds: float,
    records: Sequence[RequestRecord],
    servers: Sequence[OwnServer],
    door: FleetDoor,
) -> Measured:
    begun = {each.address: each.num_started for each in door.servers()}
    counted = [read_tokens(each.metrics_url) for each in servers]
    return Measured(
        balance=balance,
        seconds=seconds,
        num_prompt=sum(each.prompt_tokens for each in records),
        num_cached=sum(each.cached_tokens for each in records),
        num_generated=sum(each.num_tokens for each in records),
        first_token_ms=statistics.median(each.first_token_ms or 0.0 for each in records),
        requests=tuple(begun[each.address] for each in servers),
        computed=tuple(
            round(each["prompt"] - each["cached"] + each["generated"]) for each in counted
        ),
    )


def _describe(found: Measured) -> str:
    return (
        f"{found.balance}: {found.hit_rate:.0%} of {found.num_prompt} prompt tokens were known, "
        f"{found.tokens_a_second:.1f} tokens/s, requests by server {found.requests}"
    )


def _table(measured: dict[str, list[Measured]]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD)
    names = ("", "hit rate", "tokens/s", "first token, ms", "largest load / mean")
    for name in names:
        shown.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for balance, found in measured.items():
        best = _best(found)
        shown.add_row(
            balance,
            f"{_hit_rate(found):.1%}",
            f"{best.tokens_a_second:.1f}",
            f"{best.first_token_ms:,.0f}",
            f"{max(each.imbalance for each in found):.2f}",
        )
    return shown


def _verdict(measured: dict[str, list[Measured]]) -> str:
    turns, affinity = measured["round-robin"], measured["affinity"]
    hits = _hit_rate(affinity) / max(_hit_rate(turns), 1e-9)
    speed = _best(affinity).tokens_a_second / _best(turns).tokens_a_second
    load = max(each.imbalance for each in affinity)
    return (
        f"affinity / round robin: hit rate {hits:.2f} (wanted: {LEAST_HITS:g}), tokens/s "
        f"{speed:.2f} (wanted: above 1); largest load / mean {load:.2f} "
        f"(wanted: at most {MOST_LOAD:g})"
    )


def _best(found: Sequence[Measured]) -> Measured:
    return max(found, key=lambda each: each.tokens_a_second)


def _hit_rate(found: Sequence[Measured]) -> float:
    """Of all rounds."""
    return sum(each.num_cached for each in found) / sum(each.num_prompt for each in found)


def _write(measured: dict[str, list[Measured]], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    rounds = {balance: [asdict(each) for each in found] for balance, found in measured.items()}
    record = {"facts": machine_facts(), "rounds": rounds, "verdict": _verdict(measured)}
    (out / "affinity.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
