"""`quill bench engine` and `speculative`: engines without a network.

Knows: prompts, workloads, columns. Does not know: how backends work.
"""

import argparse
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from quill.export.bundle.manifest import TOKENIZER_FILE, Manifest, read_manifest
from quill.loadtest.bench.experiment import Column, Entry, Experiment, Results, Workload
from quill.loadtest.bench.models import (
    bundle_of,
    engine_entries,
)
from quill.loadtest.bench.report import (
    LABEL,
    PEAK_MB,
    VERSION,
    WEIGHTS_MB,
    run_and_report,
    speed,
)
from quill.loadtest.errors import OptionError

PAST_TOKENS = 64  # of every sequence before the measured decode steps
PREFILLS = (128, 512)
LONG_PREFILLS = (512, 2048, 8000)
BATCHES = (1, 2, 4, 8, 16, 32)
RAGGED_LENGTHS = (16, 512)  # of the shortest and the longest of eight prompts
MAX_IDS = 600
MIN_STEPS = 4
TURN_TOKENS = 64  # enough steps for a turn that is long enough to be timed

NUM_TOKENS = 128  # of an answer in `speculative`
SEEDS = (1, 2, 3)
TEMPERATURES = (0.0, 0.3, 0.7)
PLAIN, SPECULATIVE = "plain", "speculative"
PARAGRAPH = (
    "Continuous batching lets a server add new requests to a running batch at every step, instead "
    "of waiting until all of the current requests are finished. Each sequence has its own length, "
    "and a sequence that ends makes room for the next one at once. The result is a much higher use "
    "of the processor, and people wait less for their first word."
)
CODE = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    average = mean(values)
    total = 0
    for value in values:
        total += (value - average) ** 2
    return total / len(values)
"""
TEXTS = {
    "a repeated paragraph": f"{PARAGRAPH}\n\n{PARAGRAPH}\n\nContinuous batching lets",
    "code with a change": f"{CODE}\n\n{CODE.replace('total', 'result')}\n\n"
    f"{CODE.replace('mean', 'average_of')}\n\ndef mean(values):\n",
    "ordinary text": "The lighthouse keeper found a letter on the beach one morning. It said",
}


def run_engine(args: argparse.Namespace) -> None:
    bundle = bundle_of(args.bundle, getattr(args, "precision", None))
    manifest = read_manifest(bundle)
    sizes = manifest.sizes
    if args.long:
        ids = random_ids(LONG_PREFILLS[-1] + 1, sizes.vocab_size)
        workloads = prefills(ids, sizes.context, LONG_PREFILLS)
    else:
        workloads = engine_workloads(
            random_ids(MAX_IDS, sizes.vocab_size), min(sizes.context, 1024)
        )
    entries = engine_entries(args, bundle, precisions(args, manifest))
    run_and_report(speed_experiment("engine", entries, workloads, args.rounds), args.out)


def speed_experiment(
    name: str, entries: Sequence[Entry], workloads: Sequence[Workload], num_rounds: int
) -> Experiment:
    """Speed and memory of each backend."""
    speeds = [speed(each.name) for each in workloads if not each.once]
    columns = [LABEL, *speeds, WEIGHTS_MB, PEAK_MB, VERSION]
    title = "tokens a second, best of all rounds"
    return Experiment(name, title, entries, workloads, columns, num_rounds)


def precisions(args: argparse.Namespace, manifest: Manifest) -> list[str]:
    on_cpu: list[str] = [each.precision for each in manifest.graphs if each.device == "cpu"]
    return args.precision.split(",") if args.precision else on_cpu


def random_ids(num: int, vocab_size: int) -> list[int]:
    chance = random.Random(0)
    return [chance.randrange(vocab_size) for _ in range(num)]


def prefills(ids: Sequence[int], context: int, lengths: Iterable[int] = PREFILLS) -> list[Workload]:
    """Those prompts that fit, with a token of an answer."""
    fitting = [num for num in lengths if num < min(context, len(ids))]
    return [
        Workload(f"prefill {num}", [{"do": "prefill", "ids": list(ids[:num])}], num)
        for num in fitting
    ]


def engine_workloads(ids: Sequence[int], context: int) -> list[Workload]:
    """What only Quill is measured on: all batch sizes, ragged prompts, sampling."""
    return [
        *prefills(ids, context),
        *(decode(ids, num_seqs) for num_seqs in BATCHES),
        _ragged(ids, 8, context),
        decode(ids, BATCHES[-1], "sampled"),
        decode(ids, BATCHES[-1], "top-k-p"),
    ]


def decode(ids: Sequence[int], num_seqs: int, sampling: str = "") -> Workload:
    num_steps = _num_steps(num_seqs)
    order: dict[str, Any] = {"do": "decode", "ids": list(ids[:PAST_TOKENS]), "num_seqs": num_seqs}
    order |= {"num_steps": num_steps} | ({"sampling": sampling} if sampling else {})
    return Workload(f"{sampling or 'decode'} {num_seqs}", [order], num_seqs * num_steps)


def _ragged(ids: Sequence[int], num_seqs: int, context: int) -> Workload:
    shortest, longest = RAGGED_LENGTHS
    longest = min(longest, context // 2)
    lengths = [shortest + (longest - shortest) * i // (num_seqs - 1) for i in range(num_seqs)]
    prompts, num_steps = [list(ids[:length]) for length in lengths], _num_steps(num_seqs)
    order = {"do": "ragged", "prompts": prompts, "num_steps": num_steps}
    return Workload(f"ragged {num_seqs}", [order], num_seqs * num_steps)


def _num_steps(num_seqs: int) -> int:
    return max(MIN_STEPS, TURN_TOKENS // (2 * num_seqs))


class Case(NamedTuple):
    """A row of `speculative`: a text, and how its tokens are sampled."""

    text: str
    temperature: float

    def __str__(self) -> str:
        return f"{self.text}, temperature {self.temperature:g}"


def run_speculative(args: argparse.Namespace) -> None:
    """Two engines, one with speculative decoding, continue the same texts. No token may differ."""
    bundle = bundle_of(args.bundle, getattr(args, "precision", None))
    manifest = read_manifest(bundle)
    if manifest.tokenizer is None or manifest.family != "causal":
        raise OptionError(f"{bundle} continues no text; give the bundle of a causal model")
    precision = args.precision or manifest.precisions[0]
    (plain,) = engine_entries(args, bundle, [precision])
    (fast,) = engine_entries(args, bundle, [precision], "speculative")
    entries = [Entry(plain.command, PLAIN), Entry(fast.command, SPECULATIVE)]
    run_and_report(speculative_experiment(precision, entries, bundle, args.rounds), args.out)


def speculative_experiment(
    precision: str, entries: Sequence[Entry], bundle: Path, num_rounds: int
) -> Experiment:
    tokenizer = Tokenizer.from_file(str(bundle / TOKENIZER_FILE))
    cases = [Case(text, temperature) for text in TEXTS for temperature in TEMPERATURES]
    workloads = [
        Workload(str(case), [generate_order(tokenizer.encode(TEXTS[case.text]).ids, case)])
        for case in cases
    ]
    return Experiment(
        "speculative",
        f"{precision}: one sequence, with speculative decoding against without",
        entries,
        workloads,
        SPECULATIVE_COLUMNS,
        num_rounds,
        rows=lambda _: cases,
        problems=lambda results: different_tokens(results, map(str, cases)),
    )


def generate_order(ids: Sequence[int], case: Case) -> dict[str, Any]:
    seeds = SEEDS if case.temperature else SEEDS[:1]
    order = {"do": "generate", "ids": list(ids), "num_tokens": NUM_TOKENS}
    return order | {"temperature": case.temperature, "seeds": seeds}


def different_tokens(results: Results, names: Iterable[str]) -> list[str]:
    """Workloads in which not all answers of all entries and rounds are the same."""
    found = []
    for name in names:
        answers = [turn["answers"] for each in results for turn in each.turns[name]]
        if any(each != answers[0] for each in answers):
            found.append(f"speculative decoding changed tokens: {name}")
    return found


def _speedup(case: Case, results: Results) -> str:
    plain, speculative = (each.speed(str(case)) for each in results)
    return f"{speculative / plain:.2f}"


def _count(field: str) -> Column:
    heading = field.removeprefix("num_").replace("_", " ")
    return Column(heading, lambda case, results: str(results[1].last(str(case))[field]))


SPECULATIVE_COLUMNS = [
    Column("text", lambda case, _: case.text),
    Column("temperature", lambda case, _: f"{case.temperature:g}"),
    Column("speed-up", _speedup),
    Column("bar", lambda case, _: "≥ 0.98" if case.text.startswith("ordinary") else "≥ 1.5"),
    *(_count(field) for field in ("num_draft_tokens", "num_accepted", "num_tokens")),
]
