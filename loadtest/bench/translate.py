"""`quill bench translate`: how many tokens a second, beside CTranslate2 on the same weights.

Knows: which contenders there are, how their turns go. Does not know: how they work.
Everybody translates the same sources in every round, one contender after another; the best round
counts. What they say is compared, too: a translator that is wrong is fast for nothing.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
from rich import box
from rich.console import Console
from rich.table import Table

from quill.export.bundle.manifest import read_manifest
from quill.loadtest.bench.contest import PAUSE_S, Running, all_running
from quill.loadtest.bench.models import PEERS_PYTHON
from quill.loadtest.environment.machine import num_cores
from quill.loadtest.errors import OptionError


@dataclass(frozen=True)
class Decoding:
    """One column of the table."""

    num_beams: int
    num_at_once: int

    @property
    def name(self) -> str:
        kind = "greedy" if self.num_beams == 1 else f"{self.num_beams} beams"
        return f"{kind}, {self.num_at_once} at once"


WAYS = (Decoding(1, 16), Decoding(4, 8))


@dataclass
class Standing:
    """A contender's best of all rounds."""

    name: str
    speeds: dict[str, float] = field(default_factory=dict)  # tokens a second, by way
    answers: dict[str, list[list[int]]] = field(default_factory=dict)


def run(args: argparse.Namespace) -> None:
    sources = read_sources(args.bundle, args.sources, args.limit)
    threads = str(args.threads or num_cores())
    commands = [
        [
            sys.executable,
            "-m",
            "quill.loadtest.bench.contenders.quill_translator",
            str(args.bundle),
            kind,
            threads,
        ]
        for kind in args.precision.split(",")
    ]
    if args.checkpoint is not None:
        if not PEERS_PYTHON.exists() and args.peers_python is None:
            raise OptionError(
                "the peers aren't installed. Run `make peers` first; it takes minutes"
            )
        python = str(args.peers_python or PEERS_PYTHON)
        module = [
            python,
            "-m",
            "quill.loadtest.bench.contenders.ctranslate2_translator",
            str(args.checkpoint),
        ]
        commands += [[*module, kind, threads] for kind in ("float32", "int8")]
    with tempfile.TemporaryDirectory() as logs:
        standings = translate_in_turns(commands, sources, Path(logs), args.rounds)
    Console(highlight=False, width=120).print(table(standings, len(sources)))


def read_sources(bundle: Path, path: Path, limit: int) -> list[list[int]]:
    """A file's lines, as the bundle's encoder reads them."""
    manifest = read_manifest(bundle)
    if manifest.family != "seq2seq" or manifest.tokenizer is None:
        raise OptionError(f"{bundle} isn't a translation model with a tokenizer")
    tokenizer = tokenizers.Tokenizer.from_file(str(bundle / manifest.tokenizer))
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    eos, context = manifest.special_tokens.eos, manifest.sizes.context
    if eos is None:
        raise OptionError(f"{bundle} has no token that ends a source")
    encoded = [tokenizer.encode(line, add_special_tokens=False).ids for line in lines if line]
    return [[*ids[: context - 1], eos] for ids in encoded[:limit]]


def translate_in_turns(
    commands: Sequence[Sequence[str]], sources: list[list[int]], logs: Path, num_rounds: int
) -> list[Standing]:
    with all_running(commands, logs) as contenders:
        standings = [Standing(f"{each.about.name} {each.about.kind}") for each in contenders]
        for _ in range(num_rounds):
            for way in WAYS:
                for contender, standing in zip(contenders, standings, strict=True):
                    _take_turn(contender, standing, way, sources)
    return standings


def _take_turn(
    contender: Running, standing: Standing, way: Decoding, sources: list[list[int]]
) -> None:
    time.sleep(PAUSE_S)
    order = {"do": "translate", "sources": sources}
    done = contender.ask(order | {"num_beams": way.num_beams, "num_at_once": way.num_at_once})
    num_tokens = sum(len(answer) + 1 for answer in done["answers"])  # with the end of each
    speed = num_tokens / done["seconds"]
    standing.speeds[way.name] = max(speed, standing.speeds.get(way.name, 0.0))
    standing.answers[way.name] = done["answers"]


def table(standings: Sequence[Standing], num_sources: int) -> Table:
    shown = Table(title=f"tokens a second, {num_sources} sources", box=box.SIMPLE_HEAD)
    shown.add_column("")
    for way in WAYS:
        for name in (way.name, "of the best peer", "same answers"):
            shown.add_column(name, justify="right")
    peers = [each for each in standings if not each.name.startswith("Quill")]
    for standing in standings:
        cells = [standing.name]
        for way in WAYS:
            best = max((peer.speeds[way.name] for peer in peers), default=standing.speeds[way.name])
            pairs = zip(standing.answers[way.name], standings[0].answers[way.name], strict=True)
            num_same = sum(ours == theirs for ours, theirs in pairs)
            speed = standing.speeds[way.name]
            cells += [f"{speed:.0f}", f"{speed / best:.2f}", f"{num_same}"]
        shown.add_row(*cells)
    return shown
