"""`quill bench restart`: first tokens of a server that was started again with --prefix-cache-dir.

Knows: prompts, rows and bars. Does not know: how a server is started.
"""

import argparse
import math
from collections.abc import Sequence
from statistics import median

from quill.export.bundle.manifest import read_manifest
from quill.loadtest.bench.backends.quill_server import ServerConfig
from quill.loadtest.bench.engine import PAST_TOKENS, random_ids
from quill.loadtest.bench.experiment import Entry, Experiment, Results, Turn, Workload
from quill.loadtest.bench.models import bundle_of, num_threads
from quill.loadtest.bench.report import BAR_COLUMNS, BarRow, number, run_and_report
from quill.loadtest.bench.server import NUM_NEW
from quill.loadtest.errors import OptionError
from quill.server.loading.choices import choose_graphs

NUM_STREAMS = 8
COLD, RESTARTED, FROM_DISK, BESIDE = "cold", "started again", "files not in memory", "beside"


def run_restart(args: argparse.Namespace) -> None:
    bundle = bundle_of(args.bundle, args.precision)
    manifest = read_manifest(bundle)
    longest = args.prompt_tokens + args.answer
    if manifest.family != "causal" or manifest.sizes.context < longest:
        raise OptionError(f"{bundle}: a causal model with a context of {longest} is needed")
    precision = choose_graphs(manifest, "cpu", args.precision).graphs.precision
    graphs = manifest.graphs_in(precision)
    all_tokens = args.prompts * longest
    num_bytes = 1.1 * all_tokens * manifest.cache_bytes_per_token(graphs.cache_type)
    options = ["--precision", precision, "--threads", num_threads(args)]
    options += ["--prefix-cache-dir-mb", str(math.ceil(num_bytes / 2**20))]
    ids = random_ids(args.prompts * args.prompt_tokens + PAST_TOKENS, manifest.sizes.vocab_size)
    prompts = [ids[i * args.prompt_tokens :][: args.prompt_tokens] for i in range(args.prompts)]
    asked = {"do": "answer", "prompts": prompts, "num_new": args.answer}
    beside = {"do": "beside", "prompts": prompts, "ids": ids[-PAST_TOKENS:]}
    workloads = [
        Workload(COLD, [asked | {"is_empty": True}], once=True),
        Workload(RESTARTED, [asked], once=True),
        Workload(FROM_DISK, [asked | {"drops_pages": True}], once=True),
    ]
    if manifest.sizes.context >= NUM_NEW + PAST_TOKENS:  # streams don't end meanwhile
        workloads.append(Workload(BESIDE, [beside | {"num_streams": NUM_STREAMS}], once=True))
    experiment = Experiment(
        "restart",
        f"{precision}, {args.prompts} prompts of {args.prompt_tokens} tokens, one after another",
        [Entry(ServerConfig(str(bundle), tuple(options)).command("quill_restart"), "Quill")],
        workloads,
        BAR_COLUMNS,
        rows=rows,
        problems=problems,
    )
    run_and_report(experiment, args.out)


def rows(results: Results) -> list[BarRow]:
    (result,) = results
    cold = result.last(COLD)
    again = {name: result.last(name) for name in (RESTARTED, FROM_DISK)}
    size = f"{cold['directory_bytes'] / 1e6:.0f} MB in the directory"
    return [
        BarRow("first token, cold, ms", "", *_milliseconds(cold)),
        *(BarRow(f"{name}, ms", "", *_milliseconds(turn)) for name, turn in again.items()),
        *(
            BarRow(f"{name} / cold", "≤ 0.1", number(_ratio(turn, cold), 3), "of the medians")
            for name, turn in again.items()
        ),
        *(
            BarRow(f"{name}: equal answers", "all", f"{_num_equal(turn, cold)}", f"of {_num(cold)}")
            for name, turn in again.items()
        ),
        BarRow("start, empty directory, s", "", number(cold["start_s"]), ""),
        *(
            BarRow(f"start, {name}, s", "", number(turn["start_s"]), size)
            for name, turn in again.items()
        ),
        *(
            BarRow(f"gaps of {NUM_STREAMS} streams {name}, ms", "", *_gaps(quantiles_s))
            for turn in result.turns.get(BESIDE, ())
            for name, quantiles_s in turn.items()
        ),
    ]


def problems(results: Results) -> list[str]:
    (result,) = results
    cold = result.last(COLD)
    return [
        f"{_num(cold) - num} answers differ: {name}"
        for name in (RESTARTED, FROM_DISK)
        if (num := _num_equal(result.last(name), cold)) < _num(cold)
    ]


def _milliseconds(turn: Turn) -> tuple[str, str]:
    times_ms = [1000 * each for each in turn["first_tokens_s"]]
    return number(median(times_ms), 0), f"median; {min(times_ms):.0f} to {max(times_ms):.0f}"


def _ratio(turn: Turn, cold: Turn) -> float:
    return float(median(turn["first_tokens_s"]) / median(cold["first_tokens_s"]))


def _num(turn: Turn) -> int:
    return len(turn["answers"])


def _num_equal(turn: Turn, cold: Turn) -> int:
    return sum(one == other for one, other in zip(turn["answers"], cold["answers"], strict=True))


def _gaps(quantiles_s: Sequence[float]) -> tuple[str, str]:
    middle, *rest = (f"{1000 * each:.0f}" for each in quantiles_s)
    return middle, f"median; p95, p99 and most: {' '.join(rest)}"
