"""The arguments of `quill serve`.

Knows: argparse, the command's name. Does not know: the options, which server/settings.py lists; it
imports no grpc.
"""

from pathlib import Path

from quill.server.cli.arguments import Subparsers
from quill.server.settings import add_options


def add_serve(subparsers: Subparsers) -> None:
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
