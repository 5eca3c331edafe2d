"""The subcommands of the server's package and their arguments.

Imports nothing heavy: `--help` must answer at once.
Each subcommand names the function that does the work as `module:function`.
"""

from pathlib import Path

from quill.server.cli.argument_types import Subparsers
from quill.server.cli.cluster_options import add_cluster
from quill.server.cli.embed_options import add_embed, add_fill
from quill.server.cli.fleet_options import add_batch, add_top
from quill.server.cli.generate_options import add_chat, add_generate
from quill.server.cli.operator_options import add_keys, add_operating
from quill.server.settings import add_options


def register(subparsers: Subparsers) -> None:
    """Adds the server's subcommands to `quill`."""
    _add_serve(subparsers)
    add_generate(subparsers)
    add_chat(subparsers)
    add_embed(subparsers)
    add_fill(subparsers)
    add_batch(subparsers)
    add_keys(subparsers)
    add_operating(subparsers)
    add_top(subparsers)
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
