"""`quill bench peers`: Quill beside other programs, and the best of them at equal quality.

Knows: workloads, columns, the summary below the table. Does not know: how a peer is made.
Speed without quality tells nothing, so only a peer that stays near the reference can be the best.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quill.export.bundle.manifest import read_manifest
from quill.loadtest.bench.engine import MAX_IDS, decode, precisions, prefills
from quill.loadtest.bench.experiment import (
    Column,
    Entry,
    Experiment,
    Measured,
    Results,
    Workload,
)
from quill.loadtest.bench.models import bundle_of, engine_entries, num_threads
from quill.loadtest.bench.peers import (
    chosen_peers,
    held_out,
    peers_model,
    prepare_peers,
    reference,
)
from quill.loadtest.bench.report import (
    KLD,
    LABEL,
    PERPLEXITY,
    VERSION,
    WEIGHTS_MB,
    kld,
    number,
    run_and_report,
)
from quill.loadtest.errors import OptionError

BATCHES = (1, 8, 32)
MAX_KLD = 0.02
QUILL = "Quill"


def run_peers(args: argparse.Namespace) -> None:
    if args.resume and args.out is None:
        raise OptionError("--resume needs --out: the directory of earlier results")
    peers = chosen_peers(args.peers)
    bundle = bundle_of(args.bundle, args.precision)
    model = peers_model(args.bundle)
    passages = held_out(model)[: args.passages]
    ready = prepare_peers(model, peers)
    order = {"do": "score", "passages": passages}
    order["reference"] = str(reference(model, len(passages)))
    wanted = precisions(args, read_manifest(bundle))
    entries = [
        Entry(entry.command, f"{QUILL} {precision}")
        for entry, precision in zip(engine_entries(args, bundle, wanted), wanted, strict=True)
    ]
    entries += [peer.entry(model, num_threads(args)) for peer in ready]
    ids = [token for passage in passages for token in passage][:MAX_IDS]
    workloads = [*prefills(ids, MAX_IDS), *(decode(ids, num_seqs) for num_seqs in BATCHES)]
    workloads.append(Workload("score", [order], once=True))
    experiment = contest(f"peers, {model.name}", entries, workloads, args.rounds)
    run_and_report(experiment, args.out, args.resume)


@dataclass(frozen=True)
class Summary:
    """A row below the results: the best peer of each column, or one of Quill's in multiples."""

    label: str
    quill: Measured | None = None


Value = Callable[[Measured], float]


def contest(
    title: str, entries: Sequence[Entry], workloads: Sequence[Workload], num_rounds: int
) -> Experiment:
    columns = [
        *(compared(each.name, _speed_of(each.name), max) for each in workloads if not each.once),
        compared("peak MB", lambda row: (row.peak_bytes or math.nan) / 1e6, min),
    ]
    others = [_of_results(each) for each in (PERPLEXITY, KLD, WEIGHTS_MB, VERSION)]
    return Experiment(
        "peers",
        f"{title}: tokens a second, best of all rounds",
        entries,
        workloads,
        [LABEL, *columns, *others],
        num_rounds,
        rows=with_summary,
        notes=lambda _: [
            f"best peer: of those whose mean KL divergence from float32 is at most {MAX_KLD}"
        ],
    )


def with_summary(results: Results) -> list[Measured | Summary]:
    ours = [each for each in results if each.info.name == QUILL and kld(each) <= MAX_KLD]
    below = [Summary(f"{each.label} ÷ best peer", each) for each in ours]
    return [*results, Summary("best peer"), *below]


def compared(name: str, value: Value, best: Callable[..., Measured | None]) -> Column:
    """A column of numbers, of which the peers' best one is named."""

    def cell(row: Measured | Summary, results: Results) -> str:
        if isinstance(row, Measured):
            return number(value(row), 0)
        peer = best(_eligible(results, value), key=value, default=None)
        if peer is None:
            return "–"
        return peer.label if row.quill is None else number(value(row.quill) / value(peer))

    return Column(name, cell)


def _eligible(results: Results, value: Value) -> Iterable[Measured]:
    """Peers that are near enough to float32, and have this number."""
    peers = (each for each in results if each.info.name != QUILL and kld(each) <= MAX_KLD)
    return (each for each in peers if not math.isnan(value(each)))


def _speed_of(workload: str) -> Value:
    return lambda row: row.speed(workload)


def _of_results(column: Column) -> Column:
    """The same, and empty below the results."""

    def cell(row: Any, results: Results) -> str:
        return "" if isinstance(row, Summary) else column.cell(row, results)

    return Column(column.name, cell)
