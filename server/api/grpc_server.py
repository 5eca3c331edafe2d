"""The gRPC server: its services, its interceptor, its port.

Knows: grpc.aio, TLS, ports.
Does not know: when the server starts and stops, what calls do.
"""

import contextlib
import resource

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.protos import kserve_pb2_grpc as kserve_grpc
from quill.server.addresses import write_address
from quill.server.api.accepting import AcceptingServer
from quill.server.api.grpc_calls import KSERVE, Interceptor
from quill.server.api.health import Health
from quill.server.api.servicer import Administration, TextGeneration
from quill.server.auth.key_file import Keyring
from quill.server.auth.tls import server_credentials
from quill.server.errors import StartError
from quill.server.frontend.call import Calls
from quill.server.settings import Settings

SERVICE = pb.DESCRIPTOR.services_by_name["TextGeneration"].full_name
# Concurrent calls of one connection. A client that never reads responses keeps 30 KB of memory for
# each call. The limit is at least twice the queue.
MAX_CALLS = 1024
MAX_DESCRIPTORS = 2**16
# How long a call may wait unread while the process gets no CPU time. After gRPC's default of 30 s
# the call would end with CANCELLED, which clients don't retry. Deadlines still hold.
MAX_UNREAD_S = 1800
# How many calls may wait unread. Above gRPC's default of 1,000 random calls end with CANCELLED: of
# 4,500 calls over five connections 1,486, which no client retried and no log had.
MAX_UNREAD = 2**14
ADMINISTRATION = pb.DESCRIPTOR.services_by_name["Administration"].full_name


def make_server(
    settings: Settings,
    keyring: Keyring | None,
    calls: Calls,
    servicer: TextGeneration,
    inference: kserve_grpc.GRPCInferenceServiceServicer,
    administration: Administration,
    health_servicer: Health,
    probe_secret: str = "",
) -> grpc.aio.Server:
    """Without API keys there is no administrator: that service reports so, and isn't listed."""
    services = (SERVICE, ADMINISTRATION, KSERVE)
    open_reflection = "reflection" in settings.allow_unauthenticated
    interceptor = Interceptor(services, calls, keyring, open_reflection, probe_secret)
    names = [SERVICE, KSERVE, health.SERVICE_NAME, reflection.SERVICE_NAME]
    if keyring is not None:
        names.append(ADMINISTRATION)
    options = [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_concurrent_streams", max(MAX_CALLS, 2 * settings.max_queue)),
        ("grpc.server_max_unrequested_time_in_server", MAX_UNREAD_S),
        ("grpc.server.max_pending_requests", MAX_UNREAD),
        ("grpc.server.max_pending_requests_hard_limit", MAX_UNREAD),
        # Only frontends of one server share a port: a second server there is an error.
        ("grpc.so_reuseport", int(settings.frontends > 1)),
    ]
    server: grpc.aio.Server = AcceptingServer(interceptor, options)
    pb_grpc.add_TextGenerationServicer_to_server(servicer, server)
    kserve_grpc.add_GRPCInferenceServiceServicer_to_server(inference, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    pb_grpc.add_AdministrationServicer_to_server(administration, server)
    reflection.enable_server_reflection(names, server)
    return server


def allow_connections() -> None:
    """Each takes a file descriptor, and many systems give 1,024 to those who don't ask."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):  # some systems have a lower limit yet
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def bind(server: grpc.aio.Server, settings: Settings) -> int:
    """The port that it took."""
    address = write_address(settings.host, settings.port)
    credentials = None if settings.tls is None else server_credentials(settings.tls)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise StartError(
            f"can't listen at {address}: is another server there? Give another --port, or 0 for "
            "any free one"
        ) from error
