"""`quill bench fleet`: a hundred replicas in simulated time, balanced in three ways.

Knows: the story that each way to balance is put through. Does not know: how any of it is computed.

Caches fill first. Then one replica becomes slow, and stays so; five die, and come back with empty
caches. Every way to balance gets the same calls.
"""

import argparse
import json
import time
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from quill.loadtest.bench.fleet.outcome import MAX_FIRST_S, MAX_GAP_S, Outcome, summarize
from quill.loadtest.bench.fleet.picture import draw
from quill.loadtest.bench.fleet.simulation import FleetShape, Simulation, Trouble
from quill.loadtest.bench.fleet.traffic import Traffic
from quill.loadtest.environment.machine import machine_facts
from quill.server.client.target import Balance

BALANCES: tuple[Balance, ...] = ("round-robin", "least", "affinity")
NUM_DEAD = 5
SLOWNESS = 3.0
PICTURE = "fleet.png"


class Story:
    """What happens when, in parts of the duration."""

    def __init__(self, duration_s: float, num_replicas: int) -> None:
        self.counted_from_s = duration_s / 3
        self.dead = (duration_s / 2, duration_s * 2 / 3)
        self.troubles = [
            Trouble([num_replicas - 1], self.counted_from_s, duration_s, SLOWNESS),
            Trouble(range(min(NUM_DEAD, num_replicas - 1)), *self.dead),
        ]


def run(args: argparse.Namespace) -> None:
    console = Console(highlight=False)
    outcomes = []
    for balance in BALANCES:
        begin_s = time.process_time()
        outcomes.append(simulate(args, balance))
        console.print(f"{balance}: simulated in {time.process_time() - begin_s:.0f} s of processor")
    console.print(_table(outcomes))
    story = Story(args.duration, args.replicas)
    title = f"{args.replicas} simulated replicas, {args.rate:,.0f} calls a minute"
    args.out.mkdir(parents=True, exist_ok=True)
    draw(outcomes, title, story.dead, args.out / PICTURE)
    record = {"facts": machine_facts(), "outcomes": [asdict(each) for each in outcomes]}
    (args.out / "fleet.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    console.print(f"picture: {args.out / PICTURE}")


def simulate(args: argparse.Namespace, balance: Balance) -> Outcome:
    story = Story(args.duration, args.replicas)
    shape = FleetShape(num_replicas=args.replicas, num_clients=args.clients)
    traffic = Traffic(args.seed, args.rate / 60, args.apps, args.skew)
    simulation = Simulation(shape, balance, args.seed)
    result = simulation.run(traffic.calls(args.duration), story.troubles)
    return summarize(balance, result, story.counted_from_s, args.duration)


def _table(outcomes: list[Outcome]) -> Table:
    shown = Table(
        box=box.SIMPLE_HEAD,
        caption=f"served well: first token within {MAX_FIRST_S:g} s, others within "
        f"{1000 * MAX_GAP_S:g} ms of each other",
    )
    names = ("", "served well", "goodput/s", "first token p50, s", "p99, s", "hit rate", "failed")
    for name in (*names, "asked again", "largest load / mean"):
        shown.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for each in outcomes:
        shown.add_row(
            each.balance,
            f"{each.share_good:.1%}",
            f"{each.goodput:.0f}",
            f"{each.p50_first_s:.2f}",
            f"{each.p99_first_s:.2f}",
            f"{each.hit_rate:.0%}",
            str(each.num_failed),
            str(each.num_retries),
            f"{each.imbalance:.2f}",
        )
    return shown
