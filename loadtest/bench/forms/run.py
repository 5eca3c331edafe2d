"""`quill bench structured`: are answers valid, the same alone, and as fast as free ones?

Knows: `quill serve`, the bars. Does not know: how forms are kept to.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import grpc
from rich import box
from rich.console import Console
from rich.table import Table

from quill.export.bundle.manifest import read_manifest
from quill.loadtest.bench.forms.answers import Verdict, check_answers
from quill.loadtest.bench.forms.crowd import Server
from quill.loadtest.bench.forms.hostile import Siege, besiege
from quill.loadtest.bench.forms.speed import Costs, measure
from quill.loadtest.bench.models import default_bundle
from quill.loadtest.environment.machine import machine_facts
from quill.loadtest.environment.own_server import own_server
from quill.loadtest.errors import LoadtestError, OptionError

PARTS = ("answers", "speed", "hostile")
NUM_ROWS = 32
_Result = TypeVar("_Result")
_Ask = Callable[[Server], Awaitable[_Result]]


def run(args: argparse.Namespace) -> None:
    parts = _parts(args.parts)
    args.bundle = args.bundle or default_bundle()
    manifest = read_manifest(args.bundle)
    if manifest.tokenizer is None or not manifest.stop_ids or manifest.chat_template is None:
        need = "a model with a tokenizer, a chat template and an end of text"
        raise OptionError(f"{args.bundle} can't be asked for forms: give {need}")
    table = Table(title="answers that keep to a form", box=box.SIMPLE_HEAD)
    for name in ("", "bar", "seen", "more"):
        table.add_column(name, justify="right" if name in ("bar", "seen") else "left")
    found: dict[str, object] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as logs:
        if "answers" in parts:
            verdict = _with_server(args, Path(logs), lambda server: _answers(server, args))
            problems += _show_answers(table, verdict)
            found["answers"] = asdict(verdict)
        if "speed" in parts:
            costs = _with_server(
                args, Path(logs), lambda server: _speed(server, args.rounds), "--no-prefix-cache"
            )
            _show_costs(table, costs)
            found["speed"] = asdict(costs)
        if "hostile" in parts:
            siege = _with_server(args, Path(logs), besiege)
            problems += _show_siege(table, siege)
            found["hostile"] = asdict(siege)
    Console(highlight=False).print(table)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        record = json.dumps({"facts": machine_facts(), **found}, indent=1)
        (args.out / "forms.json").write_text(record, encoding="utf-8")
    if problems:
        raise LoadtestError("; ".join(problems))


def _parts(names: str) -> list[str]:
    parts = names.split(",")
    unknown = sorted({*parts} - {*PARTS})
    if unknown:
        raise OptionError(f"--parts has {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return parts


def _with_server(
    args: argparse.Namespace, logs: Path, do: "_Ask[_Result]", *options: str
) -> _Result:
    """A new one for each part: none finds what another left."""
    given = ["--max-num-seqs", str(NUM_ROWS), *options]
    given += [] if args.precision is None else ["--precision", args.precision]
    given += [] if args.threads is None else ["--threads", str(args.threads)]

    async def talk(address: str) -> _Result:
        async with grpc.aio.insecure_channel(address) as channel:
            return await do(Server(channel))

    with own_server(logs / "server.log", args.bundle, *given) as own:
        return asyncio.run(talk(own.address))


async def _answers(server: Server, args: argparse.Namespace) -> Verdict:
    _say(f"{args.seeds} answers to each schema, {NUM_ROWS} at once, and {args.alone} again alone")
    return await check_answers(server, args.seeds, NUM_ROWS, args.alone)


async def _speed(server: Server, num_rounds: int) -> Costs:
    costs = Costs()
    for number in range(num_rounds):
        _say(f"speed, round {number + 1} of {num_rounds}")
        await measure(server, NUM_ROWS, costs)
    return costs


def _show_answers(table: Table, verdict: Verdict) -> list[str]:
    statuses = ", ".join(f"{number} {name}" for name, number in verdict.statuses.items())
    table.add_row("answers", "all OK", f"{verdict.num_asked}", statuses)
    whole = f"{verdict.num_valid} of {verdict.num_whole}"
    table.add_row("valid, of those that ended", "all", whole, "by jsonschema")
    alone = f"{verdict.num_equal} of {verdict.num_alone}"
    table.add_row("the same alone", "all", alone, "tokens and finish reason")
    return verdict.problems


def _show_costs(table: Table, costs: Costs) -> None:
    """The best of all rounds counts, of each side by itself."""
    for name, pairs in (("fifty schemas", costs.schemas), ("one long text", costs.story)):
        free, formed = (max(rates) for rates in zip(*pairs, strict=True))
        all_ = _all([kept / plain for plain, kept in pairs])
        more = f"{formed:.0f} and {free:.0f} tokens/s; rounds {all_}"
        table.add_row(f"speed against free rows, {name}", "≥ 0.9", f"{formed / free:.2f}", more)
    without, beside = (min(gaps) for gaps in zip(*costs.gaps, strict=True))
    all_ = _all([after / before for before, after in costs.gaps])
    more = f"{1000 * beside:.0f} and {1000 * without:.0f} ms; rounds {all_}"
    name = "p95 gap of free rows, half of the crowd with forms"
    table.add_row(name, "≤ 1.1", f"{beside / without:.2f}", more)


def _show_siege(table: Table, siege: Siege) -> list[str]:
    num = len(siege.refused_s) + len(siege.followed_s) + len(siege.failed)
    more = f"{len(siege.refused_s)} refused, {len(siege.followed_s)} followed"
    table.add_row("hostile forms", "", f"{num}", more)
    times_s = siege.refused_s | siege.followed_s
    name = max(times_s, key=lambda each: times_s[each])
    table.add_row("the slowest, s", "≤ 1", f"{siege.slowest_s:.2f}", name)
    name = max(siege.moved, key=lambda each: siege.moved[each])
    more = f"{name}; a step has {1000 * siege.step_s:.0f} ms"
    moved = f"{siege.moved[name]:.1f}"
    table.add_row("others' longest gap, steps more than just before", "≤ 1", moved, more)
    return [f"{name}: {message}" for name, message in siege.failed.items()]


def _all(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:.2f}" for number in numbers)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
