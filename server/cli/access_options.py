"""The options of this room's subcommands that have to do with who may call whom.

Imports nothing heavy: `--help` must answer at once.
"""

import argparse
from pathlib import Path

from quill.server.cli.argument_types import address, addresses

ADDRESS = "127.0.0.1:50051"


def add_access(parser: argparse.ArgumentParser, *, many: bool = False) -> None:
    """For a client. gRPC's own lines on stderr would drown the one line that says what to do.

    `many`: of several servers the right one is asked.
    """
    parser.set_defaults(environment={"GRPC_VERBOSITY": "NONE"})
    several = "; several are quill://HOST:PORT,HOST:PORT or quill+dns://NAME:PORT"
    parser.add_argument(
        "--address",
        type=addresses if many else address,
        default=ADDRESS,
        metavar="HOST:PORT",
        help=f"default {ADDRESS}{several if many else ''}",
    )
    add_proof(parser)


def add_proof(parser: argparse.ArgumentParser) -> None:
    """How a client knows the server, and proves who it is."""
    parser.add_argument(
        "--tls", action="store_true", help="use TLS; the machine's own authorities are trusted"
    )
    parser.add_argument("--ca", type=Path, metavar="PEM", help="the same; trust this authority")
    parser.add_argument("--cert", type=Path, metavar="PEM", help="the client's own certificate")
    parser.add_argument("--key", type=Path, metavar="PEM", help="its key")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="holds the API key; or $QUILL_API_KEY"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="send the API key in the clear, if there is no TLS"
    )
