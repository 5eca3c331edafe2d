"""The options of `quill embed` and `quill fill-mask`.

Knows: argparse. Does not know: requests; it imports no grpc.
"""

import argparse
from pathlib import Path

from quill.server.cli.access_options import add_access
from quill.server.cli.argument_types import Subparsers, positive


def add_embed(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "embed",
        help="turn texts into vectors on a running server",
        description="Prints a vector for each text, a line each, or writes them to a file.",
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="- reads stdin, a text a line")
    _add_asking(parser)
    parser.add_argument(
        "--pooling",
        choices=("mean", "first", "last"),
        help="how a text's tokens become one vector (default: the model's own)",
    )
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="scale vectors to the length 1 (default: the model's own)",
    )
    parser.add_argument(
        "--dimensions", type=positive, metavar="N", help="only the first N numbers of each"
    )
    parser.add_argument(
        "--compare",
        metavar="WORD",
        help="draw how alike this word's vectors are in some sentences, instead",
    )
    parser.add_argument(
        "--sentences",
        type=Path,
        metavar="FILE",
        help="with --compare: a sentence a line (default: the TEXTs, or some with an apple)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="vectors as .npy; with --compare a .png"
    )
    parser.set_defaults(run="quill.server.cli.embed:embed", extra="serve")


def add_fill(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "fill-mask",
        help="guess masked words on a running server",
        description="Shows the likeliest tokens for each mask of a text.",
    )
    parser.add_argument(
        "text", metavar="TEXT", help='such as "The [MASK] of the union"; - reads stdin'
    )
    _add_asking(parser)
    parser.add_argument(
        "--top-k", type=positive, metavar="N", help="tokens for each mask; default 5"
    )
    parser.set_defaults(run="quill.server.cli.embed:fill", extra="serve")


def _add_asking(parser: argparse.ArgumentParser) -> None:
    add_access(parser, many=True)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="default: none")
    parser.add_argument("--json", action="store_true", help="the whole answer as JSON")
