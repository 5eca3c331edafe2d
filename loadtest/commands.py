"""The subcommands of the load test and their arguments.

Imports nothing heavy: `--help` must answer at once.
Each subcommand names the function that does the work as `module:function`.
"""

from quill.loadtest.bench.options import add_bench
from quill.loadtest.run.options import add_loadtest
from quill.server.cli.arguments import Subparsers


def register(subparsers: Subparsers) -> None:
    """Adds the subcommands to the command line."""
    parser = subparsers.add_parser(
        "loadtest",
        help="put a server under load, and report",
        description="Puts a server under load with Locust, and writes a report. With no --address "
        "it starts a server, and stops it afterwards.",
    )
    add_loadtest(parser)
    parser.set_defaults(run="quill.loadtest.run.loadtest:run", extra="loadtest")
    add_bench(subparsers)
