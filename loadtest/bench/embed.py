"""`quill bench embed`: texts a second, beside the same graph with padding and `transformers`.

Knows: which contenders there are, how their turns go. Does not know: how they work.
Everybody embeds the same texts in every round, one contender after another; the best round counts.
Their vectors are compared, too: those that are wrong are made fast for nothing.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from rich import box
from rich.console import Console
from rich.table import Table

from quill.export.bundle.manifest import Manifest, read_manifest
from quill.loadtest.bench.contest import PAUSE_S, Running, all_running
from quill.loadtest.bench.models import PEERS_PYTHON
from quill.loadtest.environment.machine import num_cores
from quill.loadtest.errors import OptionError

CONTENDERS = "quill.loadtest.bench.contenders"
# Of texts that are drawn: most are sentences, some are pages.
MIDDLE_LENGTH, SPREAD = 24, 0.9

Vectors = npt.NDArray[np.float64]


@dataclass
class Standing:
    """A contender's best of all rounds."""

    name: str
    seconds: float = float("inf")
    vectors_ND: Vectors | None = None


def run(args: argparse.Namespace) -> None:
    texts = read_texts(args.bundle, args.texts, args.limit)
    threads = str(args.threads or num_cores())
    modules = [
        [module, str(args.bundle), kind, threads, *more]
        for kind in args.precision.split(",")
        for module, more in (("quill_encoder", []), ("padded_encoder", [str(args.batch)]))
    ]
    commands = [[sys.executable, "-m", f"{CONTENDERS}.{name}", *rest] for name, *rest in modules]
    if args.transformers is not None:
        python = str(PEERS_PYTHON if PEERS_PYTHON.exists() else sys.executable)
        module = f"{CONTENDERS}.transformers_encoder"
        commands.append([python, "-m", module, str(args.transformers), "float32", threads])
    with tempfile.TemporaryDirectory() as logs:
        standings = embed_in_turns(commands, texts, Path(logs), args.rounds)
    Console(highlight=False, width=120).print(table(standings, texts))


def read_texts(bundle: Path, path: Path | None, limit: int) -> list[list[int]]:
    """A file's lines, as the bundle's encoder reads them; or texts of a random mix of lengths."""
    manifest = read_manifest(bundle)
    if manifest.family != "encoder":
        raise OptionError(f"{bundle} isn't an encoder's bundle")
    if path is None:
        return drawn_texts(manifest, limit)
    if manifest.tokenizer is None:
        raise OptionError(f"{bundle} has no tokenizer, so it can't read {path}. Leave --texts out")
    tokenizer = tokenizers.Tokenizer.from_file(str(bundle / manifest.tokenizer))
    special = manifest.special_tokens
    before = [special.bos] if manifest.prepend_bos and special.bos is not None else []
    after = [special.eos] if manifest.append_eos and special.eos is not None else []
    most = manifest.sizes.context - len(before) - len(after)
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    encoded = [tokenizer.encode(line, add_special_tokens=False).ids for line in lines if line]
    return [[*before, *ids[:most], *after] for ids in encoded[:limit]]


def drawn_texts(manifest: Manifest, number: int) -> list[list[int]]:
    """The same ones every time."""
    chance, sizes = random.Random(0), manifest.sizes
    lengths = [
        min(max(2, round(MIDDLE_LENGTH * chance.lognormvariate(0, SPREAD))), sizes.context)
        for _ in range(number)
    ]
    return [[chance.randrange(sizes.vocab_size) for _ in range(length)] for length in lengths]


def embed_in_turns(
    commands: Sequence[Sequence[str]], texts: list[list[int]], logs: Path, num_rounds: int
) -> list[Standing]:
    with all_running(commands, logs) as contenders:
        standings = [Standing(f"{each.about.name} {each.about.kind}") for each in contenders]
        for contender in contenders:
            contender.ask({"do": "embed", "texts": texts[:64]})  # nobody's first run counts
        for _ in range(num_rounds):
            for contender, standing in zip(contenders, standings, strict=True):
                _take_turn(contender, standing, texts)
    return standings


def _take_turn(contender: Running, standing: Standing, texts: list[list[int]]) -> None:
    time.sleep(PAUSE_S)
    done = contender.ask({"do": "embed", "texts": texts})
    standing.seconds = min(standing.seconds, done["seconds"])
    standing.vectors_ND = np.array(done["vectors"])


def table(standings: Sequence[Standing], texts: Sequence[Sequence[int]]) -> Table:
    """Cosines are with the last one: `transformers`, if it takes part."""
    lengths = sorted(map(len, texts))
    middle = lengths[len(lengths) // 2]
    title = f"{len(texts)} texts, {sum(lengths)} tokens, median {middle}, longest {lengths[-1]}"
    shown = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("", "seconds", "texts/s", "tokens/s", "Quill's speed, of this", "least cosine"):
        shown.add_column(name, justify="right" if name else "left")
    truth_ND, best = standings[-1].vectors_ND, standings[0].seconds
    for each in standings:
        speeds = (len(texts) / each.seconds, sum(lengths) / each.seconds)
        cells = [f"{each.seconds:.2f}", *(f"{speed:,.0f}" for speed in speeds)]
        assert each.vectors_ND is not None
        assert truth_ND is not None
        cosine = least_cosine(each.vectors_ND, truth_ND)
        shown.add_row(each.name, *cells, f"{each.seconds / best:.2f}", f"{cosine:.8f}")
    return shown


def least_cosine(ours_ND: Vectors, theirs_ND: Vectors) -> float:
    lengths_N = np.linalg.norm(ours_ND, axis=1) * np.linalg.norm(theirs_ND, axis=1)
    return float(((ours_ND * theirs_ND).sum(axis=1) / lengths_N).min())
