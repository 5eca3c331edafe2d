"""The options of `quill cluster`.

Knows: argparse, the options. Does not know: what they do; it imports no Ray.
"""

import argparse

from quill.server.cli.arguments import (
    Subparsers,
    port,
    positive,
    replicas,
    seconds,
    sha256,
)
from quill.server.settings import CLUSTER_OPTIONS, add_options


def add_cluster(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "cluster",
        help="serve a bundle by several replicas, with Ray Serve",
        description="Serves a bundle by several replicas behind one address, with Ray Serve.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_up(actions)
    _add_config(actions)
    _add_reload(actions)


def _add_up(actions: Subparsers) -> None:
    parser = actions.add_parser(
        "up",
        help="start Ray and replicas on this machine, until Ctrl-C",
        description="Starts Ray and replicas on this machine, until Ctrl-C. Running calls finish "
        "first; a second Ctrl-C ends them.",
    )
    _add_plan(parser, threads="default: the cores, shared by the replicas")
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1: this machine only")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="other machines may call: something in front of it terminates TLS",
    )
    parser.add_argument("--dashboard", action="store_true", help="Ray's, at 127.0.0.1:8265")
    parser.set_defaults(run="quill.server.cluster.commands:up", extra="cluster")


def _add_config(actions: Subparsers) -> None:
    parser = actions.add_parser(
        "config",
        help="write serve.yaml, for `serve deploy`",
        description="Writes the file for `serve deploy` on a Ray cluster, with explanations.",
    )
    _add_plan(parser, threads="default 4")
    parser.add_argument("--host", default="0.0.0.0", help="default 0.0.0.0")
    parser.add_argument(
        "--ray-service", action="store_true", help="a RayService for Kubernetes instead"
    )
    parser.add_argument(
        "--image", default="quill-cluster:0.1.0", help="of its pods (default quill-cluster:0.1.0)"
    )
    parser.set_defaults(run="quill.server.cluster.commands:config", extra="cluster")


def _add_reload(actions: Subparsers) -> None:
    parser = actions.add_parser(
        "reload",
        help="load the bundle on disk, one replica at a time",
        description="Reloads all replicas, one at a time, from a machine of the Ray cluster. From "
        "other machines, `quill reload` does the same with an admin's API key.",
    )
    parser.set_defaults(run="quill.server.cluster.commands:reload", extra="cluster")


def _add_plan(parser: argparse.ArgumentParser, threads: str) -> None:
    parser.add_argument(
        "bundle",
        metavar="BUNDLE",
        help="a directory made by export, or a URL of one that fsspec can read: s3://, https://, …",
    )
    parser.add_argument(
        "--sha256",
        type=sha256,
        metavar="HASH",
        help="of the bundle's manifest.json: no other is served",
    )
    parser.add_argument(
        "--replicas",
        type=replicas,
        default=(2, 2),
        metavar="N|N..M",
        help="how many; N..M: as many as the requests need (default 2)",
    )
    parser.add_argument(
        "--target-requests",
        type=positive,
        metavar="N",
        help="running and waiting in each replica; more start another replica (default: 0.7 "
        "times --max-num-seqs)",
    )
    parser.add_argument(
        "--drain-timeout",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long running calls of a replica that stops may go on (default 600)",
    )
    parser.add_argument("--port", type=port, default=50051, help="for gRPC (default 50051)")
    metrics = "each replica takes the first free port from it on; 'off': none ('auto': 9464)"
    add_options(
        parser,
        CLUSTER_OPTIONS,
        defaults={"log_format": "json"},
        helps={"threads": threads, "metrics_port": metrics},
    )
