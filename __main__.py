"""One command, `quill`, with a subcommand for each job.

Knows: which packages there are. Does not know: their arguments, or what they import.
Each package has a `commands` module that declares its subcommands with argparse alone; the
module that does the work is imported only when its subcommand runs.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from quill.command_table import Parser

PACKAGES = ("model", "export", "server", "loadtest")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="quill",
        description="Train a Transformer, export it to ONNX, serve it over gRPC.",
        epilog="`quill COMMAND --help` explains each command.",
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for package in PACKAGES:
        importlib.import_module(f"quill.{package}.commands").register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    # Ended in good order, so that what was half written goes. Commands that drain have their own.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return run(args)
    except KeyboardInterrupt:
        print("quill: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output left (`quill … | head`): not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run(args: argparse.Namespace) -> int:
    """Imports the module behind the subcommand and hands it the arguments.

    A package's own errors carry `exit_code`; they are for people and print as one line.
    `environment` is for libraries that read it when they are imported; the user's own goes first.
    """
    for name, value in getattr(args, "environment", {}).items():
        os.environ.setdefault(name, value)
    module_name, function_name = args.run.split(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        function(args)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        print(
            f"quill: this command needs the Python package '{missing}', which isn't installed. "
            f"In Quill's clone, install the extra that brings it: pip install '.[{args.extra}]'",
            file=sys.stderr,
        )
        return 3
    except Exception as error:
        exit_code = getattr(error, "exit_code", None)
        if exit_code is None:
            raise
        print(f"quill: {error}", file=sys.stderr)
        return int(exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
