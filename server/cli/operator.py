"""`quill reload` and `quill health`: what those who run a server ask of it.

Knows: channels, the services for operators. Does not know: text.
"""

import argparse

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.client.access import read_access
from quill.server.client.errors import read_error
from quill.server.errors import ServerError

HEALTH_TIMEOUT_S = 5.0


class UnhealthyError(ServerError):
    """The server answers, and doesn't serve."""


def reload(args: argparse.Namespace) -> None:
    access = read_access(args)
    with access.channel(args.address) as channel:
        stub = pb_grpc.AdministrationStub(channel)
        try:
            reply = stub.Reload(pb.ReloadRequest(), timeout=args.timeout, metadata=access.metadata)
        except grpc.RpcError as error:
            raise read_error(error, access) from error
    model = reply.model
    print(f"{model.name} is on duty: {model.precision}, up to {model.max_num_seqs} rows")


def health(args: argparse.Namespace) -> None:
    """Without a key: health is open to all."""
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
        raise UnhealthyError(f"{args.address} says {state}")
    print(state)
