"""`make soak`: the mixed and the unfriendly crowd together, at twice what the server can carry.

Knows: the order of things. Does not know: how a request is asked, or what must be shown.

    python -m quill.loadtest.run.soak --minutes 20 --bundle bundles/tiny

First a closed loop finds what the server carries; that is also the warm-up. Then requests come at
twice that rate, whatever the server does. In the end some answers are asked for again, alone.
"""

import argparse
import itertools
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from quill.loadtest.environment.own_server import OwnServer, own_server, read_log
from quill.loadtest.environment.process_stats import ProcessSample, look_at, watch_process
from quill.loadtest.errors import LoadtestError
from quill.loadtest.protocols.grpc_door import GrpcDoor
from quill.loadtest.results.verify import verify
from quill.loadtest.run.soak_verdict import REFUSED, Judgement, SoakResult, judge, times_ms
from quill.loadtest.workload.arrivals import arrivals
from quill.loadtest.workload.ask import Ask, Facts
from quill.loadtest.workload.call import call
from quill.loadtest.workload.closed_loop import closed_loop
from quill.loadtest.workload.records import RequestRecord
from quill.loadtest.workload.scenarios import make_ask

SLOTS, QUEUE = 8, 16
SERVE = ("--max-num-seqs", str(SLOTS), "--max-queue", str(QUEUE), "--kv-cache-mb", "512")
MAX_CALLS = 200  # at once, at this end: far more than the server takes
OVERLOAD = 2.0
SHOW_S = 10.0
SETTLE_S = 60.0


class SoakClient:
    """Asks, and keeps what became of it."""

    def __init__(self, address: str, seed: int) -> None:
        self._doors = [GrpcDoor(address) for _ in range(8)]
        self._facts, self._address, self._seed = Facts.of(self._doors[0].get_model()), address, seed
        self.records: list[RequestRecord] = []

    def ask(self, index: int, due_s: float | None = None) -> None:
        """Even ones are of the mixed crowd, odd ones of the unfriendly."""
        name = ("mixed", "unfriendly")[index % 2]
        ask = make_ask(name, self._seed, index, self._facts)
        ask = replace(ask, expected=(*ask.expected, "OK", REFUSED))
        due_s = time.monotonic() if due_s is None else due_s
        measured = self._call(ask, index, due_s)
        self.records.append(measured)  # a list's append is one step for all threads

    def _call(self, ask: Ask, index: int, due_s: float) -> RequestRecord:
        at_s = time.time() - (time.monotonic() - due_s)
        if not ask.reconnect:
            door = self._doors[index % len(self._doors)]
            return call(door, ask, due_s).record(ask, index, ask.kind, at_s)
        with closing(GrpcDoor(self._address)) as door:
            return call(door, ask, due_s).record(ask, index, ask.kind, at_s)

    def close(self) -> None:
        for door in self._doors:
            door.close()


def find_capacity(crowd: SoakClient, indices: Iterator[int], duration_s: float) -> float:
    """Requests a second that end while every slot is taken and few wait."""

    def ask(_: object) -> int:
        crowd.ask(next(indices))  # a count's next is one step for all threads
        return 0  # tokens aren't counted here

    served = closed_loop(ask, [()], SLOTS + 4, duration_s)
    return served.num_requests / served.seconds


def overload(crowd: SoakClient, indices: Iterator[int], rate: float, duration_s: float) -> int:
    """Sends at the rate, whatever comes back. How many were sent; all of them have ended."""
    start_s, shown_s, sent = time.monotonic(), time.monotonic(), []
    with ThreadPoolExecutor(MAX_CALLS) as pool:
        for offset_s in arrivals(0, 0, rate, 0.0):
            if offset_s > duration_s:
                break
            due_s = start_s + offset_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            future: Future[None] = pool.submit(crowd.ask, next(indices), due_s)
            sent.append(future)
            if time.monotonic() - shown_s > SHOW_S:
                shown_s = time.monotonic()
                _say(
                    f"{shown_s - start_s:5.0f} s: {len(sent):,} sent, {len(crowd.records):,} ended"
                )
    for future in sent:
        future.result()
    return len(sent)


def metric(server: OwnServer, name: str) -> float:
    """The sum over all labels."""
    assert server.metrics_url is not None
    with urllib.request.urlopen(server.metrics_url, timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def settle(server: OwnServer, start: ProcessSample) -> tuple[ProcessSample, bool]:
    """Waits a while for connections to be closed, then samples."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        look = look_at(server.pid)
        is_idle = not metric(server, "quill_sequences_running") + metric(
            server, "quill_requests_waiting"
        )
        if (is_idle and look.num_fds <= start.num_fds) or time.monotonic() > end_s:
            return look, is_idle
        time.sleep(0.2)


def soak(
    log: Path, bundle: Path | None, duration_s: float, num_verified: int, *options: str
) -> Judgement:
    with own_server(log, bundle, *SERVE, *options) as server:
        # One call first: what the server opens once for all isn't a leak.
        SoakClient(server.address, 0).close()
        settle(server, look_at(server.pid))
        start = look_at(server.pid)
        crowd = SoakClient(server.address, seed=0)
        before = metric(server, 'quill_requests_total{method="GenerateStream"')
        indices = itertools.count()
        capacity = find_capacity(crowd, indices, min(60.0, 0.2 * duration_s))
        calm_ms = times_ms(read_log(log), "OK")
        num_calm = len(crowd.records)
        rate = OVERLOAD * capacity
        _say(f"it carries {capacity:.1f} requests/s; now {rate:.1f} requests/s come")
        with watch_process(server.pid) as watcher:
            num_sent = num_calm + overload(crowd, indices, rate, duration_s)
        crowd.close()
        end, is_idle = settle(server, start)
        num_ended = round(metric(server, 'quill_requests_total{method="GenerateStream"') - before)
        _say(f"now {num_verified:,} of the answers are asked for again, alone")
        verdict = verify(server.address, _some(crowd.records, num_verified), lambda *_: None)
        soaked = SoakResult(
            records=crowd.records,
            num_sent=num_sent,
            num_ended=num_ended,
            # Whoever is let in waits for a full queue at most; then it is served as in calm.
            bound_ms=3 * (max(calm_ms, default=0.0) + 1000 * QUEUE / capacity),
            start=start,
            end=end,
            samples=watcher.samples[len(watcher.samples) // 3 :],
            is_idle=is_idle,
            log=read_log(log),
            verdict=verdict,
        )
    return judge(soaked)


def _some(records: Sequence[RequestRecord], number: int) -> Sequence[RequestRecord]:
    """Spread over the whole run; refusals say nothing."""
    answered = [record for record in records if record.status != REFUSED]
    return answered[:: max(1, len(answered) // max(1, number))][:number]


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--bundle", type=Path, help="default: the default model")
    parser.add_argument("--verify", type=int, default=200, metavar="N")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        try:
            judgement = soak(Path(name) / "log", args.bundle, 60 * args.minutes, args.verify)
        except LoadtestError as error:
            print(f"soak: {error}", file=sys.stderr)
            return error.exit_code
    print("\n".join(judgement.lines))
    print(f"soaked for {args.minutes:g} minutes: {'FAILED' if judgement.failures else 'passed'}")
    return 1 if judgement.failures else 0


if __name__ == "__main__":
    sys.exit(main())
