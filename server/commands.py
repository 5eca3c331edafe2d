"""The commands of the server's package and their arguments.

Imports nothing heavy: `--help` must answer at once.
Each command names the function that does the work as `module:function`.
"""

from pathlib import Path

from quill.server.cli.arguments import Subparsers
from quill.server.cli.client_commands import add_client_commands
from quill.server.cli.cluster_options import add_cluster
from quill.server.settings import add_options


def register(subparsers: Subparsers) -> None:
    """Adds the server's commands to `quill`."""
    _add_serve(subparsers)
    add_client_commands(subparsers)
    add_cluster(subparsers)


def _add_serve(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a bundle over gRPC and HTTP",
        description="Serves a bundle over gRPC and HTTP. What isn't given is chosen from the "
        "machine's memory and the bundle, and logged.",
    )
    parser.add_argument(
        "bundle",
        nargs="?",
        type=Path,
        metavar="BUNDLE",
        help="a directory made by export (default: SmolLM2-135M-Instruct, made on the first start)",
    )
    add_options(parser)
    parser.set_defaults(run="quill.server.serve.run:run", extra="serve")
