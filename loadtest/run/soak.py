"""`make soak`: the scenarios mixed and unfriendly together, at twice the server's capacity.

Knows: the order of the steps. Does not know: how a request is sent, what passes
(loadtest/run/soak_criteria.py).

    python -m quill.loadtest.run.soak --minutes 20 --bundle bundles/tiny
    python -m quill.loadtest.run.soak --minutes 60 --load-factor 1.5 --keys 2 --faults --verify 500

First a closed loop measures the capacity; that is also the warm-up. Then requests come at a
multiple of that rate, whatever the server does; with --faults clients resume what breaks, and
processes are starved, killed and reloaded in turns. At the end some requests are sent again, alone.
"""

import argparse
import itertools
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from quill.loadtest.environment.faults import FAULTS, inject, wait_until_noticed
from quill.loadtest.environment.process import (
    ProcessSample,
    sample_process,
    watch_process,
)
from quill.loadtest.environment.server import (
    RUNNING,
    WAITING,
    StartedServer,
    fetch_metrics,
    read_log,
    start_server,
)
from quill.loadtest.errors import LoadtestError
from quill.loadtest.protocols.connect import PoolClient
from quill.loadtest.protocols.grpc import GrpcClient, ProtocolClient
from quill.loadtest.results.verify import verify
from quill.loadtest.run.soak_criteria import (
    REJECTED,
    Judgment,
    SoakOptions,
    SoakResult,
    judge,
    times_ms,
)
from quill.loadtest.workload.call import call
from quill.loadtest.workload.closed_loop import closed_loop
from quill.loadtest.workload.records import RequestRecord
from quill.loadtest.workload.request import LoadRequest, ModelInfo
from quill.loadtest.workload.scenarios import make_request
from quill.loadtest.workload.schedule import arrivals
from quill.server.client.access import Access
from quill.server.client.retry import Retries

SEQUENCES, QUEUE = 8, 16
SERVE = ("--max-num-seqs", str(SEQUENCES), "--max-queue", str(QUEUE), "--kv-cache-mb", "512")
MAX_CALLS = 200  # concurrent calls of the clients: far more than the server admits
SHOW_S = 10.0
SETTLE_S = 60.0
MAX_MORE_PERIODS = 10  # until each fault has happened
# A rejection is an answer: calls that retried it would be more than the clients have threads for.
RESUMING = Retries(retry_rejected=False)


class SoakClient:
    """Sends requests and keeps their records. `accesses`: the callers, in turns."""

    def __init__(
        self,
        address: str,
        seed: int,
        accesses: Sequence[Access] = (Access(),),
        resumes: bool = False,
    ) -> None:
        self._address, self._seed, self._resumes = address, seed, resumes
        self._accesses = accesses
        self._clients = [self._connect(number) for number in range(8)]
        with closing(GrpcClient(address, accesses[0])) as client:
            self._info = ModelInfo.of(client.get_model())
        self.records: list[RequestRecord] = []

    def _connect(self, number: int) -> ProtocolClient:
        access = self._accesses[number % len(self._accesses)]
        if self._resumes:
            return PoolClient(self._address, access, RESUMING)
        return GrpcClient(self._address, access)

    def send(self, index: int, due_s: float | None = None) -> None:
        """Even numbers are of the scenario mixed, odd ones of unfriendly."""
        name = ("mixed", "unfriendly")[index % 2]
        load = make_request(name, self._seed, index, self._info)
        load = replace(load, expected=(*load.expected, "OK", REJECTED))
        if self._resumes and "DEADLINE_EXCEEDED" in load.expected:  # too short for a restart
            load = replace(load, expected=(*load.expected, "UNAVAILABLE"))
        due_s = time.monotonic() if due_s is None else due_s
        measured = self._call(load, index, due_s)
        self.records.append(measured)  # appending is atomic

    def _call(self, load: LoadRequest, index: int, due_s: float) -> RequestRecord:
        at_s = time.time() - (time.monotonic() - due_s)
        if not load.reconnect:
            client = self._clients[index // 2 % len(self._clients)]
            return call(client, load, due_s).record(load, index, load.kind, at_s)
        with closing(self._connect(index // 2)) as client:
            return call(client, load, due_s).record(load, index, load.kind, at_s)

    def close(self) -> None:
        for client in self._clients:
            client.close()


def find_capacity(client: SoakClient, indices: Iterator[int], duration_s: float) -> float:
    """Requests a second while the server runs its maximum of sequences and few requests wait."""

    def send(_: object) -> int:
        client.send(next(indices))  # itertools.count is atomic
        return 0  # tokens aren't counted here

    served = closed_loop(send, [()], SEQUENCES + 4, duration_s)
    return served.num_requests / served.seconds


def overload(client: SoakClient, indices: Iterator[int], rate: float, duration_s: float) -> int:
    """Sends at the rate, whatever the server does. Returns the number sent when all have ended."""
    start_s, shown_s, sent = time.monotonic(), time.monotonic(), []
    num_before = len(client.records)
    with ThreadPoolExecutor(MAX_CALLS) as pool:
        for offset_s in arrivals(0, 0, rate, 0.0):
            if offset_s > duration_s:
                break
            due_s = start_s + offset_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            future: Future[None] = pool.submit(client.send, next(indices), due_s)
            sent.append(future)
            if time.monotonic() - shown_s > SHOW_S:
                shown_s = time.monotonic()
                num_ended = len(client.records) - num_before
                _print(f"{shown_s - start_s:5.0f} s: {len(sent):,} sent, {num_ended:,} ended")
    for future in sent:
        future.result()
    return len(sent)


def num_streams(log: Path) -> int:
    """Streams that have ended, as the server logged them: a killed process's metrics are gone."""
    return sum(entry.get("method") == "GenerateStream" for entry in read_log(log))


def settle(server: StartedServer, start: ProcessSample) -> tuple[ProcessSample, bool]:
    """Waits a while for connections to be closed and for what was killed, then samples."""
    end_s = time.monotonic() + SETTLE_S
    sample, is_idle = start, False
    while time.monotonic() < end_s:
        with suppress(OSError):
            sample, metrics = sample_process(server.pid), fetch_metrics(server.metrics_url)
            is_idle = not metrics.value(RUNNING) + metrics.value(WAITING)
            if is_idle and sample.num_fds <= start.num_fds:
                break
        time.sleep(0.2)
    return sample, is_idle


def make_keys(folder: Path, number: int) -> tuple[tuple[str, ...], Sequence[Access]]:
    """The server's options, and one access for each key; for none the only one without a key."""
    if not number:
        return (), (Access(),)
    file = folder / "keys.json"
    command = [sys.executable, "-m", "quill", "keys", "add", str(file)]
    secrets = [
        subprocess.run([*command, f"key{each}"], capture_output=True, text=True, check=True).stdout
        for each in range(number)
    ]
    options = ("--api-keys", str(file), "--allow-unauthenticated", "metrics")
    return options, [Access(api_key=secret.strip()) for secret in secrets]


def soak(folder: Path, bundle: Path | None, options: SoakOptions, *serve: str) -> Judgment:
    """`serve`: more options of the server, whose log and keys are in `folder`."""
    log = folder / "log"
    key_options, accesses = make_keys(folder, options.num_keys)
    with start_server(log, bundle, *SERVE, *key_options, *serve) as server:
        # One call first: what the server opens only once isn't a leak.
        SoakClient(server.address, 0, accesses).close()
        settle(server, sample_process(server.pid))
        start = sample_process(server.pid)
        client = SoakClient(server.address, 0, accesses, resumes=bool(options.faults))
        before, indices = num_streams(log), itertools.count()
        capacity = find_capacity(client, indices, min(60.0, 0.2 * options.duration_s))
        normal_ms = times_ms(read_log(log), "OK")
        num_warm_up = len(client.records)
        rate = options.load_factor * capacity
        _print(f"capacity {capacity:.1f} requests/s; now {rate:.1f} requests/s are sent")
        faults = inject(server.pid, options.faults, options.fault_period_s, log)
        with watch_process(server.pid) as watcher, faults:
            num_sent = num_warm_up + overload(client, indices, rate, options.duration_s)
            for _ in range(MAX_MORE_PERIODS):  # a busy machine restarts slowly
                if set(options.faults) <= set(faults.samples):
                    break
                num_sent += overload(client, indices, rate, options.fault_period_s)
        client.close()
        wait_until_noticed(log, faults.samples)
        end, is_idle = settle(server, start)
        num_ended = num_streams(log) - before
        _print(f"now {options.num_verified:,} of the answers are requested again, alone")
        some = _some(client.records, options.num_verified)
        verdict = verify(server.address, some, lambda *_: None, accesses[0])
        soaked = SoakResult(
            records=client.records,
            num_sent=num_sent,
            num_ended=num_ended,
            # An admitted request waits for a full queue at most; then it is served as before.
            bound_ms=3 * (max(normal_ms, default=0.0) + 1000 * QUEUE / capacity),
            start=start,
            end=end,
            samples=watcher.samples[len(watcher.samples) // 3 :],
            is_idle=is_idle,
            log=read_log(log),
            verdict=verdict,
            options=options,
            injected=faults.samples,
        )
    return judge(soaked)


def _some(records: Sequence[RequestRecord], number: int) -> Sequence[RequestRecord]:
    """Answers with tokens, spread over the whole run."""
    answered = [record for record in records if record.token_ids]
    return answered[:: max(1, len(answered) // max(1, number))][:number]


def _print(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=20.0)
    add("--bundle", type=Path, help="default: the default model")
    add("--verify", type=int, default=200, metavar="N")
    add("--load-factor", type=float, default=2.0, metavar="F", help="of the capacity (default 2)")
    add("--keys", type=int, default=0, metavar="N", help="API keys, which clients use in turns")
    add("--faults", nargs="*", choices=list(FAULTS), metavar="FAULT",
        help=f"in turns; without a name all: {', '.join(FAULTS)}")  # fmt: skip
    add("--fault-period", type=float, default=60.0, metavar="S", help="from one to the next")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # nothing of each retry
    faults = list(FAULTS) if args.faults == [] else args.faults or []
    options = SoakOptions(
        duration_s=60 * args.minutes,
        num_verified=args.verify,
        load_factor=args.load_factor,
        num_keys=args.keys,
        faults=faults,
        fault_period_s=args.fault_period,
    )
    with tempfile.TemporaryDirectory() as name:
        try:
            judgment = soak(Path(name), args.bundle, options)
        except LoadtestError as error:
            print(f"soak: {error}", file=sys.stderr)
            return error.exit_code
    print("\n".join(judgment.lines))
    print(f"soaked for {args.minutes:g} minutes: {'FAILED' if judgment.failures else 'passed'}")
    return 1 if judgment.failures else 0


if __name__ == "__main__":
    sys.exit(main())
