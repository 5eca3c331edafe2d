"""`quill bench speculative`: what guessing from the text so far gains one row; no token may change.

Knows: texts that repeat themselves and one that doesn't, the bare engine as a contender.
Does not know: how guesses are made.

Two engines, one with guesses and one without, continue the same text in turns.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from quill.export.bundle.manifest import TOKENIZER_FILE, read_manifest
from quill.loadtest.bench.contest import Running, running
from quill.loadtest.bench.models import default_bundle
from quill.loadtest.environment.machine import machine_facts, num_cores
from quill.loadtest.errors import ContenderError, OptionError

NUM_TOKENS = 128
SEEDS = (1, 2, 3)
TEMPERATURES = (0.0, 0.3, 0.7)
BAR, ORDINARY_BAR = "≥ 1.5", "≥ 0.98"

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
    "a paragraph again": f"{PARAGRAPH}\n\n{PARAGRAPH}\n\nContinuous batching lets",
    "code with a change": f"{CODE}\n\n{CODE.replace('total', 'result')}\n\n"
    f"{CODE.replace('mean', 'average_of')}\n\ndef mean(values):\n",
    "ordinary text": "The lighthouse keeper found a letter on the beach one morning. It said",
}


class Case(NamedTuple):
    """One row of the table: a text, and how its tokens are chosen."""

    name: str
    prompt: tuple[int, ...]
    temperature: float


class Found(NamedTuple):
    """The best seconds of all seeds together, without and with guesses."""

    without_s: float
    with_s: float
    num_tokens: int
    num_draft_tokens: int
    num_accepted: int


def run(args: argparse.Namespace) -> None:
    bundle = args.bundle or default_bundle()
    manifest = read_manifest(bundle)
    if manifest.tokenizer is None or manifest.family != "causal":
        raise OptionError(f"{bundle} continues no text; give the bundle of a causal model")
    tokenizer = Tokenizer.from_file(str(bundle / TOKENIZER_FILE))
    cases = [
        Case(name, tuple(tokenizer.encode(text).ids), temperature)
        for name, text in TEXTS.items()
        for temperature in TEMPERATURES
    ]
    precision = args.precision or manifest.precisions[0]
    command = [sys.executable, "-m", "quill.loadtest.bench.contenders.quill", str(bundle)]
    command += [precision, str(args.threads or num_cores())]
    console = Console(stderr=True, highlight=False)
    shown = Table(title=f"{precision}: one row, with guesses against without", box=box.SIMPLE_HEAD)
    for heading in ("text", "temperature", "times as fast", "bar", "guessed", "right", "of tokens"):
        shown.add_column(heading, justify="left" if heading == "text" else "right")
    with (
        tempfile.TemporaryDirectory() as logs,
        running(command, Path(logs) / "without.log") as without,
        running([*command, "speculative"], Path(logs) / "with.log") as guessing,
    ):
        found = {}
        for case in cases:
            console.print(f"{case.name}, temperature {case.temperature:g}")
            found[case] = _measure(case, without, guessing, args.rounds)
            _add(shown, case, found[case])
    Console(highlight=False).print(shown)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        results = [{**_told(case), **each._asdict()} for case, each in found.items()]
        record = {"facts": machine_facts(), "precision": precision, "results": results}
        (args.out / "guesses.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
        console.print(f"guesses.json is in {args.out}")


def _told(case: Case) -> dict[str, Any]:
    return {"text": case.name, "temperature": case.temperature}


def _measure(case: Case, without: Running, guessing: Running, num_rounds: int) -> Found:
    """In turns; of each seed the best time counts."""
    without_s, with_s, num_tokens, num_draft_tokens, num_accepted = 0.0, 0.0, 0, 0, 0
    for seed in SEEDS if case.temperature else SEEDS[:1]:
        wishes = {"temperature": case.temperature, "seed": seed, "num_tokens": NUM_TOKENS}
        order: dict[str, Any] = {"do": "write", "ids": case.prompt} | wishes
        plain, guessed = [], []
        for _ in range(num_rounds):
            plain.append(without.ask(order))
            guessed.append(guessing.ask(order))
        if any(each["token_ids"] != plain[0]["token_ids"] for each in (*plain, *guessed)):
            raise ContenderError(f"guesses changed tokens: {case.name}, {wishes}")
        without_s += min(each["seconds"] for each in plain)
        with_s += min(each["seconds"] for each in guessed)
        num_tokens += len(guessed[0]["token_ids"])
        num_draft_tokens += guessed[-1]["num_draft_tokens"]
        num_accepted += guessed[-1]["num_accepted"]
    return Found(without_s, with_s, num_tokens, num_draft_tokens, num_accepted)


def _add(shown: Table, case: Case, found: Found) -> None:
    shown.add_row(
        case.name,
        f"{case.temperature:g}",
        f"{found.without_s / found.with_s:.2f}",
        ORDINARY_BAR if case.name.startswith("ordinary") else BAR,
        str(found.num_draft_tokens),
        str(found.num_accepted),
        str(found.num_tokens),
    )
