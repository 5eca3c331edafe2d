"""`quill keys`, `quill reload` and `quill health`: commands for those who run a server.

Knows: the file of API keys, the services for operators. Does not know: text.
"""

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.auth.key_file import add_key, read_keys, revoke_key
from quill.server.client.access import read_access
from quill.server.client.errors import read_error
from quill.server.errors import ServerError

HEALTH_TIMEOUT_S = 5.0


class UnhealthyError(ServerError):
    """The server responds, and doesn't serve."""


def reload(args: argparse.Namespace) -> None:
    access = read_access(args)
    with access.channel(args.address) as channel:
        stub = pb_grpc.AdministrationStub(channel)
        try:
            reply = stub.Reload(pb.ReloadRequest(), timeout=args.timeout, metadata=access.metadata)
        except grpc.RpcError as error:
            raise read_error(error, access) from error
    model = reply.model
    print(f"{model.name} is loaded: {model.precision}, up to {model.max_num_seqs} sequences")


def health(args: argparse.Namespace) -> None:
    """Without an API key: the health service needs none."""
    access = read_access(args)
    with access.channel(args.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(
                health_pb2.HealthCheckRequest(), timeout=args.timeout or HEALTH_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise read_error(error, access) from error
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise UnhealthyError(f"{args.address} is {state}")
    print(state)


def add_keys(args: argparse.Namespace) -> None:
    """The key alone goes to stdout, so that it can be redirected into a file."""
    secret = add_key(
        args.file,
        args.name,
        requests_per_minute=args.requests_per_minute,
        max_concurrent=args.max_concurrent,
        tokens_per_minute=args.tokens_per_minute,
        max_prompt_tokens=args.max_prompt_tokens,
        admin=args.admin,
    )
    print(secret)
    print(
        "The key is shown this once. Give it to the client as a file for "
        "--api-key-file, or in $QUILL_API_KEY.",
        file=sys.stderr,
    )


def list_keys(args: argparse.Namespace) -> None:
    for key in read_keys(args.file):
        state = f"revoked {key.revoked}" if key.revoked else f"created {key.created}"
        rate = "any rate" if key.requests_per_minute is None else f"{key.requests_per_minute}/min"
        most = "any number" if key.max_concurrent is None else f"{key.max_concurrent}"
        limits = [rate, f"{most} at once"]
        if key.tokens_per_minute is not None:
            limits.append(f"{key.tokens_per_minute} tokens/min")
        if key.max_prompt_tokens is not None:
            limits.append(f"prompts up to {key.max_prompt_tokens} tokens")
        print(f"{key.name}: {state}, {', '.join(limits)}{', admin' if key.admin else ''}")


def revoke_keys(args: argparse.Namespace) -> None:
    revoke_key(args.file, args.name)
    print(f"{args.name} is revoked. Servers reject its next call; running calls finish.")
