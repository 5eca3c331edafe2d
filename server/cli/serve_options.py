"""The options of `quill serve`.

Knows: argparse, what a person may choose. Does not know: what comes of it; it imports no grpc.
"""

import argparse
from pathlib import Path

from quill.server.cli.argument_types import (
    Subparsers,
    optional_port,
    port,
    positive,
    seconds,
)


def add_protection(parser: argparse.ArgumentParser) -> None:
    """For a server."""
    parser.add_argument("--tls-cert", type=Path, metavar="PEM", help="the server's certificate")
    parser.add_argument(
        "--tls-key",
        type=Path,
        metavar="PEM",
        help="its key. Both are read again when they change; streams go on",
    )
    parser.add_argument(
        "--client-ca",
        type=Path,
        metavar="PEM",
        help="only clients with a certificate signed by this authority may call",
    )
    add_keys_of_callers(parser)
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow other machines to call in the clear, or without proof of who they are",
    )


def add_keys_of_callers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="only callers with one of these keys may call; made by `quill keys add`",
    )
    parser.add_argument(
        "--allow-unauthenticated",
        action="append",
        default=[],
        choices=("reflection", "metrics"),
        help="to callers without a key, too; may be given twice (health always is)",
    )
    parser.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="callers of all keys share cached prefixes. Faster where prompts have one in common; "
        "but a caller can find out by timing what others sent",
    )


def add_serve(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a bundle over gRPC and HTTP",
        description="Serves a bundle over gRPC and HTTP. What isn't given is chosen from the "
        "machine's memory and the bundle, and printed.",
    )
    parser.add_argument(
        "bundle",
        nargs="?",
        type=Path,
        metavar="BUNDLE",
        help="a directory made by export (default: SmolLM2-135M-Instruct, made on the first start)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1: this machine only")
    parser.add_argument("--port", type=port, default=50051, help="0 takes a free one and prints it")
    parser.add_argument(
        "--metrics-port",
        default="auto",
        metavar="PORT",
        type=optional_port,
        help="for Prometheus; 'off' for none (default: the next port, or a free one)",
    )
    parser.add_argument(
        "--http-port",
        default="auto",
        metavar="PORT",
        type=optional_port,
        help="for OpenAI's clients and browsers; 'off' for none (default: the second next port, or "
        "a free one)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--precision",
        metavar="NAME",
        help="which graphs: fp32, quill4, quill8 or fp16 (default: the bundle's fastest)",
    )
    add_sizes(parser)
    add_protection(parser)
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM (default 30)",
    )
    parser.add_argument(
        "--watchdog",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="health says NOT_SERVING while a step takes longer (default 60)",
    )
    add_telling(parser, "text")
    parser.set_defaults(run="quill.server.serve.run:run", extra="serve")


def add_telling(parser: argparse.ArgumentParser, log_format: str, whose: str = "") -> None:
    """What a server tells of its calls."""
    parser.add_argument(
        "--tracing",
        action="store_true",
        help="send OpenTelemetry spans; $OTEL_EXPORTER_OTLP_ENDPOINT says where to",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default=log_format,
        help=f"{whose}json: an object a line, for machines (default {log_format})",
    )


def add_sizes(parser: argparse.ArgumentParser, threads: str = "default: one a core") -> None:
    parser.add_argument(
        "--max-num-seqs",
        type=positive,
        metavar="N",
        help="sequences that run at the same time, if the KV cache holds them (default 256)",
    )
    parser.add_argument(
        "--context", type=positive, metavar="TOKENS", help="prompt and answer together"
    )
    parser.add_argument("--threads", type=positive, metavar="N", help=threads)
    parser.add_argument(
        "--spinning",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="threads stay awake between steps, which is faster; --no-spinning is for cores that "
        "other programs keep busy too (default: spinning)",
    )
    parser.add_argument(
        "--max-queue",
        type=positive,
        default=256,
        metavar="N",
        help="requests that may wait; one more is refused (default 256)",
    )
    parser.add_argument(
        "--kv-cache-mb",
        type=positive,
        metavar="MB",
        help="memory of the KV cache, for running sequences and cached prefixes (default: 2,048 "
        "where there is as much)",
    )
    parser.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prefix caching: sequences with a shared prefix share its KV blocks (default: on)",
    )
    parser.add_argument(
        "--speculative",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="speculative decoding by prompt lookup (n-gram), where it is faster; it changes no "
        "token (default: on)",
    )
