"""The subcommands of this room and their arguments.

Imports nothing heavy: `--help` must answer at once.
Each subcommand names the function that does the work as `module:function`.
"""

import argparse
from typing import TYPE_CHECKING

from quill.loadtest.bench.options import add_bench
from quill.loadtest.compare.options import add_compare
from quill.loadtest.run.options import add_loadtest

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def register(subparsers: "Subparsers") -> None:
    """Adds this room's subcommands to the front door."""
    _add_loadtest(subparsers)
    add_bench(subparsers)
    add_compare(subparsers)


def _add_loadtest(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "loadtest",
        help="put a server under load, and report",
        description="Puts a server under load with Locust, and writes a report. With no --address "
        "it starts a server, and stops it afterwards.",
    )
    add_loadtest(parser)
    parser.set_defaults(run="quill.loadtest.run.loadtest:run", extra="loadtest")
