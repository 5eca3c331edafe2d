"""`quill compare`: translators of several generations, with the same data and the same time.

Knows: the order of things. Does not know: how each is done.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from quill.export.bundle.manifest import read_manifest
from quill.loadtest.bench.contest import Running, running
from quill.loadtest.compare import stages
from quill.loadtest.compare.page import write_page
from quill.loadtest.compare.standing import (
    Sentence,
    Standing,
    bleu,
    by_length,
    sharpest,
    title_of,
)
from quill.loadtest.environment.machine import machine_facts, num_cores
from quill.loadtest.errors import OptionError

PRESETS = ("rnn-fixed-tiny", "gru-bahdanau-tiny", "lstm-bahdanau-tiny", "seq2seq-tiny")
NUM_ALONE = 40  # sentences that are served one at a time, for their speed
NUM_AT_ONCE = 16
NUM_ROUNDS = 3  # the best counts


def run(args: argparse.Namespace) -> None:
    if not 0 < args.minutes < 1e5:
        raise OptionError(f"--minutes is {args.minutes}; give a number above 0")
    if args.sentences < 1:
        raise OptionError(f"--sentences is {args.sentences}; at least 1 is needed")
    for each in args.runs or ():
        stages.read_run(each)  # before minutes of work
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    runs = args.runs or [out / "runs" / preset for preset in PRESETS]
    if args.runs is None:
        for number, (preset, run) in enumerate(zip(PRESETS, runs, strict=True), 1):
            print(f"── training {number} of {len(PRESETS)}: {preset} ──", flush=True)
            stages.train(preset, run, out / "probes" / preset, args.minutes)
    standings = []
    for number, each in enumerate(runs, 1):
        print(f"── measuring {number} of {len(runs)}: {each.name} ──", flush=True)
        standings.append(measure(each, out / "measured" / f"{number}-{each.name}", args))
    page = write_page(out, standings, machine_facts())
    print(f"{page}: {len(standings)} translators compared")


def measure(run: Path, directory: Path, args: argparse.Namespace) -> Standing:
    """Exports, translates in PyTorch and served, and looks at the run's log."""
    model = stages.read_run(run)["model"]
    title, context = title_of(model)
    directory.mkdir(parents=True, exist_ok=True)
    bundle = directory / "bundle"
    stages.export(run, bundle)
    asked = stages.answers(run, directory / "answers.jsonl", args.sentences)
    manifest = read_manifest(bundle)
    precision = manifest.precisions[0]
    with running(_translator(bundle, precision), directory / "served.log") as served:
        alone_speed, crowd_speed, answers = _serve(served, [each["source_ids"] for each in asked])
    sentences = _sentences(bundle, asked, answers)
    ends = set(manifest.stop_ids)
    num_equal = sum(
        _without_end(each["answers"]["greedy"]["token_ids"], ends) == answer
        for each, answer in zip(asked, answers, strict=True)
    )
    aligned = stages.alignment(run, args.sentence, directory / "alignment.json")
    log = stages.read_log(run)
    return Standing(
        title=title,
        context=context,
        num_parameters=manifest.sizes.num_parameters,
        precision=precision,
        minutes=log[-1]["elapsed_s"] / 60,
        num_steps=log[-1]["step"],
        train_speed=statistics.median(entry["tokens_per_s"] for entry in log),
        losses=[
            (entry["elapsed_s"] / 60, entry["held_out_loss"])
            for entry in log
            if "held_out_loss" in entry
        ],
        bleu=bleu(sentences),
        by_length=by_length(sentences),
        alone_speed=alone_speed,
        crowd_speed=crowd_speed,
        num_equal=num_equal,
        num_sentences=len(asked),
        alignment=None if aligned is None else sharpest(aligned),
    )


def _translator(bundle: Path, precision: str) -> list[str]:
    module = "quill.loadtest.bench.contenders.quill_translator"
    return [sys.executable, "-m", module, str(bundle), precision, str(num_cores())]


def _serve(
    served: Running, sources: Sequence[Sequence[int]]
) -> tuple[float, float, list[list[int]]]:
    """Tokens a second alone and in a crowd, and the crowd's answers."""
    alone, crowd, answers = 0.0, 0.0, list[list[int]]()
    for _ in range(NUM_ROUNDS):
        alone = max(alone, _speed(_ask(served, sources[:NUM_ALONE], 1)))
        done = _ask(served, sources, NUM_AT_ONCE)
        crowd, answers = max(crowd, _speed(done)), done["answers"]
    return alone, crowd, answers


def _ask(served: Running, sources: Sequence[Sequence[int]], num_at_once: int) -> dict[str, Any]:
    order = {"do": "translate", "sources": sources, "num_beams": 1}
    return served.ask(order | {"num_at_once": num_at_once})


def _speed(done: dict[str, Any]) -> float:
    num_tokens = sum(len(answer) + 1 for answer in done["answers"])  # with the end of each
    return float(num_tokens / done["seconds"])


def _without_end(ids: list[int], ends: set[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] in ends else ids


def _sentences(
    bundle: Path, asked: Sequence[dict[str, Any]], answers: Sequence[Sequence[int]]
) -> list[Sentence]:
    tokenizer = tokenizers.Tokenizer.from_file(str(bundle / "tokenizer.json"))
    return [
        Sentence(
            len(each["source_ids"]) - 1,
            each["reference"],
            tokenizer.decode(list(answer), skip_special_tokens=True),
        )
        for each, answer in zip(asked, answers, strict=True)
    ]
