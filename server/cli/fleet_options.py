"""The options of the commands that ask any number of servers.

Knows: argparse. Does not know: requests; it imports no grpc.
"""

import argparse
from pathlib import Path

from quill.server.cli.access_options import ADDRESS, add_proof
from quill.server.cli.argument_types import (
    Subparsers,
    address,
    addresses,
    natural,
    positive,
    seconds,
)


def add_batch(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "batch",
        help="answer a file of prompts on running servers",
        description="Answers every line of a file, in order, and goes on where it was stopped if "
        "it is started again. A line is a JSON object with prompt, messages or input, and options "
        "by the names of protos/generation.proto, or a line of OpenAI's batch files. Where it has "
        "no seed, it gets one by its number: so the same file has the same answers. The exit code "
        "is 4 if lines failed.",
    )
    parser.add_argument("input", type=Path, metavar="IN.jsonl", help="a JSON object a line")
    parser.add_argument("output", type=Path, metavar="OUT.jsonl", help="an answer a line")
    parser.set_defaults(environment={"GRPC_VERBOSITY": "NONE"}, default_address=ADDRESS)
    parser.add_argument(
        "--address",
        action="append",
        type=addresses,
        metavar="HOST:PORT",
        help="several times, or quill://HOST:PORT,HOST:PORT or quill+dns://NAME:PORT, for several "
        f"servers of the same model (default {ADDRESS})",
    )
    parser.add_argument(
        "--http",
        action="append",
        type=address,
        metavar="HOST:PORT",
        help="where the servers speak HTTP, for OpenAI's lines (default: two ports further)",
    )
    add_proof(parser)
    _add_pace(parser)
    parser.set_defaults(run="quill.server.client.tools.batch:batch", extra="client")


def add_top(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "top",
        help="watch running servers in the terminal",
        description="Shows what servers do: health, sequences that run and requests that wait, "
        "tokens a second, time to first token and between tokens (median / 95%), memory for keys "
        "and values, prompts whose beginning was known, guesses that were right. The numbers are "
        "those of their metrics.",
    )
    parser.add_argument(
        "addresses",
        nargs="*",
        type=addresses,
        metavar="HOST:PORT",
        help="a server's metrics or HTTP port, or its gRPC port if the metrics are at the next "
        "one; quill://HOST:PORT,HOST:PORT; quill+dns://NAME:PORT, looked up again each time "
        f"(default {ADDRESS})",
    )
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="SECONDS", help="between looks (default 1)"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one table and leave; exit code 1 if no server serves",
    )
    add_proof(parser)
    parser.set_defaults(
        run="quill.server.client.tools.top:top", extra="client", default_address=ADDRESS
    )


def _add_pace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--concurrency",
        type=positive,
        default=32,
        metavar="N",
        help="lines that are asked at once, on all servers together (default 32)",
    )
    parser.add_argument(
        "--seed",
        type=natural,
        default=0,
        metavar="N",
        help="another number gives other seeds to lines that have none (default 0)",
    )
    parser.add_argument(
        "--unavailable-timeout",
        type=seconds,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait while no server answers at all (default 300)",
    )
    parser.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", help="for one line (default: none)"
    )
