"""Prefix affinity against round robin over several servers.

    python -m quill.loadtest.studies.affinity [BUNDLE] --servers 3 --kv-cache-mb 64

Knows: the scenario system-prompts, servers that it starts. Does not know: how a server is chosen.

Closed-loop users send the same requests with each balancing policy, in turns, and every time to new
servers with empty caches. A server's KV cache (--kv-cache-mb) holds about a third of the system
prompts: where every server can cache all of them, it doesn't matter which server is chosen.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from quill.loadtest.bench.backends.protocol import BackendInfo, serve
from quill.loadtest.bench.experiment import Column, Entry, Experiment, Measured, Turn, Workload
from quill.loadtest.bench.report import LABEL, number, run_and_report
from quill.loadtest.environment.server import StartedServer, fetch_metrics, start_server
from quill.loadtest.errors import BackendError
from quill.loadtest.protocols.connect import PoolClient
from quill.loadtest.protocols.grpc import GrpcClient
from quill.loadtest.workload.call import call
from quill.loadtest.workload.closed_loop import IsOver, run_users
from quill.loadtest.workload.records import RequestRecord
from quill.loadtest.workload.request import ModelInfo
from quill.loadtest.workload.scenarios import make_request

SCENARIO, RUN = "system-prompts", "run"
POLICIES = ("round-robin", "affinity")


class Servers:
    """The backend: starts servers for each turn."""

    info = BackendInfo("Quill", "", "", 0)

    def run(
        self,
        bundle: str,
        options: list[str],
        num_servers: int,
        num_users: int,
        num_requests: int,
        seed: int,
        policy: str,
    ) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
            path = Path(bundle) if bundle else None
            servers = [
                stack.enter_context(start_server(Path(logs, f"{i}.log"), path, *options))
                for i in range(num_servers)
            ]
            with closing(GrpcClient(servers[0].address)) as client:
                info = ModelInfo.of(client.get_model())
            target = f"quill://{','.join(each.address for each in servers)}?balance={policy}"
            pool = stack.enter_context(closing(PoolClient(target)))
            begin_s = time.perf_counter()
            records = send_all(pool, info, seed, num_requests, num_users)
            seconds = time.perf_counter() - begin_s
            return measure(records, servers, pool) | {"seconds": seconds}


def send_all(
    pool: PoolClient, info: ModelInfo, seed: int, num_requests: int, num_users: int
) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    numbers = itertools.count()

    def user(_: int, is_over: IsOver) -> None:
        while not is_over() and (index := next(numbers)) < num_requests:
            load = make_request(SCENARIO, seed, index, info)
            record = call(pool, load, time.monotonic()).record(load, index, SCENARIO, time.time())
            if not record.ok:
                raise BackendError(f"request {index} ended with {record.status}")
            records.append(record)

    run_users(user, num_users)
    return records


def measure(
    records: list[RequestRecord], servers: list[StartedServer], pool: PoolClient
) -> dict[str, Any]:
    """Prefix hits, and the largest server's load as a multiple of the mean: by requests or by
    computed tokens, whichever is worse."""
    started = {each.address: each.num_started for each in pool.servers()}
    requests = [started[each.address] for each in servers]
    metrics = [fetch_metrics(each.metrics_url) for each in servers]
    signs = {"prompt": 1, "cached": -1, "generated": 1}
    computed = [
        sum(sign * each.value("quill_tokens_total", kind=kind) for kind, sign in signs.items())
        for each in metrics
    ]
    num_prompt = sum(each.prompt_tokens for each in records)
    return {
        "num_tokens": sum(each.num_tokens for each in records),
        "hit_rate": sum(each.cached_tokens for each in records) / num_prompt,
        "first_token_ms": statistics.median(each.first_token_ms or 0.0 for each in records),
        "imbalance": max(max(each) / statistics.mean(each) for each in (requests, computed)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("bundle", nargs="?", default="", help="default: smollm2-135m")
    add("--servers", type=int, default=3)
    add("--threads", type=int, default=1, help="of each server")
    add("--kv-cache-mb", type=int, default=64, help="of each server")
    add("--context", type=int, default=2048)
    add("--users", type=int, default=12)
    add("--requests", type=int, default=400)
    add("--rounds", type=int, default=2)
    add("--seed", type=int, default=1)
    add("--out", type=Path)
    args = parser.parse_args()
    options = ["--threads", str(args.threads), "--http-port", "off"]
    options += ["--kv-cache-mb", str(args.kv_cache_mb), "--context", str(args.context)]
    order = {"do": RUN, "bundle": args.bundle, "options": options, "num_servers": args.servers}
    order |= {"num_users": args.users, "num_requests": args.requests}
    orders = [order | {"seed": args.seed + i} for i in range(args.rounds)]
    command = [sys.executable, "-m", __spec__.name, "backend"]
    entries = [Entry(command, policy, {"policy": policy}) for policy in POLICIES]
    workload = Workload(RUN, orders)
    experiment = Experiment("affinity", SCENARIO, entries, [workload], COLUMNS, args.rounds)
    run_and_report(experiment, args.out)


def _mean(name: str, digits: int = 2) -> Column:
    def cell(row: Measured, _: object) -> str:
        turns: list[Turn] = row.turns[RUN]
        return number(statistics.mean(turn[name] for turn in turns), digits)

    return Column(name.replace("_", " "), cell)


COLUMNS = [
    LABEL,
    _mean("hit_rate"),
    Column("tokens/s", lambda row, _: number(row.speed(RUN), 1)),
    _mean("first_token_ms", 0),
    _mean("imbalance"),
]

if __name__ == "__main__":
    if sys.argv[1:] == ["backend"]:
        serve(Servers())
    else:
        main()
