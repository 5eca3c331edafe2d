"""The subcommands for those who run a server, and their arguments.

Imports nothing heavy: `--help` must answer at once.
"""

import argparse
from pathlib import Path

from quill.server.auth.quota import BURST_S
from quill.server.cli.access_options import add_access
from quill.server.cli.argument_types import Subparsers, positive, seconds


def add_keys(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "keys",
        help="make, list and revoke the API keys of a server",
        description="Makes, lists and revokes API keys. A running server notices by itself.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for action, function, text in (
        ("add", "add", "make a key, and print it"),
        ("list", "show", "names and limits"),
        ("revoke", "revoke", "refuse a key from now on"),
    ):
        each = actions.add_parser(action, help=text, description=f"{text.capitalize()}.")
        each.add_argument("file", type=Path, metavar="FILE", help="as for `quill serve --api-keys`")
        if action != "list":
            each.add_argument("name", metavar="NAME", help="the client's; logs show it")
        if action == "add":
            _add_limits(each)
        each.set_defaults(run=f"quill.server.cli.api_keys:{function}", extra="serve")


def add_operating(subparsers: Subparsers) -> None:
    for name, text, description in (
        (
            "reload",
            "put the bundle on disk on duty, without a pause",
            "Makes a running server load its bundle again. Needs an admin's API key; without keys, "
            "send the server SIGHUP instead.",
        ),
        (
            "health",
            "ask a server whether it serves",
            "Asks a server whether it serves. The exit code is 0 if so, else 1.",
        ),
    ):
        parser = subparsers.add_parser(name, help=text, description=description)
        add_access(parser)
        parser.add_argument(
            "--timeout", type=seconds, metavar="SECONDS", help="default: none, or 5 for health"
        )
        parser.set_defaults(run=f"quill.server.cli.operator:{name}", extra="serve")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests-per-minute",
        type=positive,
        metavar="N",
        help=f"on average: a key that rested has saved calls up, and {BURST_S:g} seconds' worth "
        "may come at once, but always one (default: no limit)",
    )
    parser.add_argument(
        "--max-concurrent",
        type=positive,
        metavar="N",
        help="calls that run or wait at the same time (default: no limit)",
    )
    parser.add_argument(
        "--tokens-per-minute",
        type=positive,
        metavar="N",
        help="read and generated, on average: what a call uses beyond what was saved up, the next "
        "ones wait for (default: no limit)",
    )
    parser.add_argument(
        "--max-prompt-tokens",
        type=positive,
        metavar="N",
        help="of one call (default: what the context holds)",
    )
    parser.add_argument("--admin", action="store_true", help="may reload the bundle")
