"""The subcommands of export and their arguments.

Imports nothing heavy: `--help` must answer at once, with no torch loaded.
"""

import argparse
from pathlib import Path

from quill.command_table import Command, Option, Subparsers, add_commands

_EXPORT = (
    Option(
        "checkpoint",
        "a directory made by train or import, or a name that import knows (smollm2-135m)",
        "CHECKPOINT",
        Path,
    ),
    Option("--out", "the bundle's directory", "OUT", Path, None, {"required": True}),
    Option(
        "--precision",
        "precisions to write, from fp32, quill4, quill8 (for the CPU) and fp16 (for CUDA), "
        "separated by commas, or all (default: the one that a server on this machine chooses)",
        "LIST",
        str,
    ),
    Option(
        "--add", "add precisions to the existing bundle at --out; it must be of the same checkpoint"
    ),
    Option(
        "--verify",
        "compare the graphs with PyTorch before the bundle is written (default: yes)",
        more={"action": argparse.BooleanOptionalAction, "default": True},
    ),
    Option(
        "--text",
        "held-out text for perplexity: a text file, or for seq2seq a TSV of pairs (default: what "
        "the training run held out; for imported weights the corpus sotu)",
        "TEXT",
        Path,
    ),
)
COMMANDS = (
    Command(
        "export",
        "quill.export.cli.export:run",
        "turn a checkpoint into a bundle of ONNX graphs",
        _EXPORT,
        "Turns a checkpoint into a bundle of ONNX graphs with a KV cache, and verifies within a "
        "tolerance that they compute what PyTorch computes.",
        "export",
    ),
    Command(
        "inspect",
        "quill.export.cli.inspect:run",
        "show what is in a bundle, and check it",
        (
            Option("bundle", "a directory made by export", "BUNDLE", Path),
            Option("--speed", "also measure decode steps of 1, 8 and 32 sequences, and a prefill"),
        ),
        "Shows a bundle's family, sizes, graphs, operators and provenance, and checks the hash of "
        "every file.",
        "export",
    ),
)


def register(subparsers: Subparsers) -> None:
    """Adds export's subcommands to the command line."""
    add_commands(subparsers, COMMANDS)
