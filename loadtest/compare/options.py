"""The arguments of `quill compare`. Imports nothing heavy: `--help` must answer at once."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_MINUTES = 10.0
DEFAULT_SENTENCES = 400
SENTENCE = "The file could not be opened because it does not exist."


def add_compare(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "compare",
        help="recurrent translators beside the Transformer, on one page",
        description="Trains a plain recurrent network with a fixed context, a GRU and an LSTM with "
        "Bahdanau's attention, and the Transformer, for the same time each, on English and German; "
        "serves them; and writes one page: BLEU against length, alignments, loss against time, "
        "speed. What is there already is taken: it can be interrupted and started again.",
    )
    parser.add_argument("--out", type=Path, default=Path("compare"), metavar="DIR")
    parser.add_argument(
        "--minutes",
        type=float,
        default=DEFAULT_MINUTES,
        metavar="M",
        help=f"of training for each, {DEFAULT_MINUTES:g} unless told otherwise",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="compare these runs of `quill train` instead of training",
    )
    parser.add_argument(
        "--sentences",
        type=int,
        default=DEFAULT_SENTENCES,
        metavar="N",
        help=f"of the test set, to be translated by each (default {DEFAULT_SENTENCES})",
    )
    parser.add_argument(
        "--sentence", default=SENTENCE, metavar="TEXT", help="whose alignments are drawn"
    )
    parser.set_defaults(run="quill.loadtest.compare.compare:run", extra="export,loadtest")
