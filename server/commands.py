"""The commands of the server's package and their arguments.

Imports nothing heavy: `--help` must answer at once.
Each command names the function that does the work as `module:function`.
"""

import argparse
from pathlib import Path

from quill.model.sources.catalogue import DEFAULT
from quill.model.sources.kinds import HELP
from quill.server.cli.arguments import Subparsers, add_command, add_option, replicas, sha256
from quill.server.cli.client_commands import add_client_commands
from quill.server.settings import CLUSTER_OPTIONS, add_options, port_number, positive, seconds


def register(subparsers: Subparsers) -> None:
    """Adds the server's commands to `quill`."""
    _add_serve(subparsers)
    _add_doctor(subparsers)
    add_client_commands(subparsers)
    _add_cluster(subparsers)


def _add_serve(subparsers: Subparsers) -> None:
    parser = add_command(
        *(subparsers, "serve", "quill.server.serve.run:run", "serve"),
        help="serve a model over gRPC and HTTP",
        description="Serves a model over gRPC and HTTP. What isn't a bundle yet is fetched, "
        "imported, exported and verified on the first start, and kept in Quill's cache. What isn't "
        "given is chosen from the machine's memory and the model, and logged.",
    )
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help=f"{HELP} (default: {DEFAULT})",
    )
    add_options(parser)


def _add_doctor(subparsers: Subparsers) -> None:
    parser = add_command(
        *(subparsers, "doctor", "quill.server.doctor.doctor:run", "serve"),
        help="check whether a bundle computes here what it should, and how fast",
        description="Shows what this machine has, whether a bundle computes here what it should, "
        "whether it is batch-invariant here, and how fast it is. Exit code 0: sound; 1: it can't "
        "be checked; 3: results are wrong; 4: right, but not batch-invariant.",
    )
    parser.add_argument(
        "source", nargs="?", metavar="SOURCE", help=f"{HELP} (default: only the machine)"
    )
    add_options(parser, ("device", "precision", "threads"))
    add_option(parser, "--json", "write a report to send, without names or paths", Path, "FILE")


def _add_cluster(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "cluster",
        help="serve a bundle by several replicas, with Ray Serve",
        description="Serves a bundle by several replicas behind one address, with Ray Serve.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    up = add_command(
        *(actions, "up", "quill.server.cluster.commands:up", "cluster"),
        help="start Ray and replicas on this machine, until Ctrl-C",
        description="Starts Ray and replicas on this machine, until Ctrl-C. Running calls finish "
        "first; a second Ctrl-C ends them.",
    )
    _add_plan(up, threads="default: the cores, shared by the replicas")
    add_option(up, "--host", "127.0.0.1: this machine only", str, None, "127.0.0.1")
    add_option(up, "--dashboard", "Ray's, at 127.0.0.1:8265")
    config = add_command(
        *(actions, "config", "quill.server.cluster.commands:config", "cluster"),
        help="write serve.yaml, for `serve deploy`",
        description="Writes the file for `serve deploy` on a Ray cluster, with explanations.",
    )
    _add_plan(config, threads="default 4")
    add_option(config, "--host", "where the cluster listens", str, None, "0.0.0.0")
    add_option(config, "--ray-service", "a RayService for Kubernetes instead")
    add_option(config, "--image", "of its pods", str, None, "quill-cluster:0.1.0")
    add_command(
        *(actions, "reload", "quill.server.cluster.commands:reload", "cluster"),
        help="load the bundle on disk, one replica at a time",
        description="Reloads all replicas, one at a time, from a machine of the Ray cluster. From "
        "other machines, `quill reload` does the same with an admin's API key.",
    )


def _add_plan(parser: argparse.ArgumentParser, *, threads: str) -> None:
    url = "a directory made by export, or a URL of one that fsspec can read: s3://, https://, …"
    parser.add_argument("bundle", metavar="BUNDLE", help=url)
    own = "of the bundle's manifest.json: no other is served"
    add_option(parser, "--sha256", own, sha256, "HASH")
    many = "how many; N..M: as many as the requests need (default 2)"
    parser.add_argument("--replicas", type=replicas, default=(2, 2), metavar="N|N..M", help=many)
    target = (
        "running and waiting in each replica; more start another replica (default: 0.7 times "
        "--max-num-seqs)"
    )
    add_option(parser, "--target-requests", target, positive, "N")
    drain = "how long running calls of a replica that stops may go on"
    add_option(parser, "--drain-timeout", drain, seconds, "SECONDS", 600.0)
    add_option(parser, "--port", "for gRPC", port_number, None, 50051)
    insecure = "other machines may call: something in front of it terminates TLS"
    add_option(parser, "--insecure", insecure)
    metrics = "each replica takes the first free port from it on; 'off': none ('auto': 9464)"
    add_options(
        parser,
        CLUSTER_OPTIONS,
        defaults={"log_format": "json"},
        helps={"threads": threads, "metrics_port": metrics},
    )
