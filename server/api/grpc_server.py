"""The gRPC server: its services, its interceptor, its port, its health.

Knows: grpc.aio, TLS, ports, and the private parts of grpc.aio 1.85 that accept calls.
Does not know: when the server starts and stops, what calls do.
"""

import asyncio
import contextlib
import importlib
import logging
import resource
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.protos import kserve_pb2_grpc as kserve_grpc
from quill.server.addresses import write_address
from quill.server.api.grpc_calls import KSERVE, Interceptor
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
logger = logging.getLogger(__name__)

_NOW = {
    "failing": "step after step fails; health says NOT_SERVING until one succeeds",
    "restarting": "health says NOT_SERVING: the engine's process is started again",
    "unread": "calls wait unaccepted for seconds; health says NOT_SERVING until they don't",
    "stopping": "health says NOT_SERVING: the server is stopping",
}
_OVER = {"failing": "steps succeed again"}
ADMINISTRATION = pb.DESCRIPTOR.services_by_name["Administration"].full_name


def make_server(
    settings: Settings,
    keyring: Keyring | None,
    calls: Calls,
    servicer: TextGeneration,
    inference: kserve_grpc.GRPCInferenceServiceServicer,
    administration: Administration,
    health_servicer: health.aio.HealthServicer,
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
        ("grpc.so_reuseport", 0),  # a second server on the same port is an error
    ]
    server: grpc.aio.Server = _Server([interceptor], options, interceptor.note_expired)
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


class Health:
    """Belongs to the event loop, but for `note_soon`."""

    def __init__(self, service: str) -> None:
        self.servicer = health.aio.HealthServicer()
        self._services = ("", service)
        self._loop = asyncio.get_running_loop()
        self._problems = {"loading"}

    @property
    def is_serving(self) -> bool:
        return not self._problems

    def has(self, problem: str) -> bool:
        return problem in self._problems

    async def begin(self) -> None:
        await self._publish()

    async def note(self, problem: str, is_there: bool) -> None:
        if is_there == (problem in self._problems):
            return
        if is_there:
            self._problems.add(problem)
        else:
            self._problems.discard(problem)
        message = (_NOW if is_there else _OVER).get(problem)
        if message is not None:
            logger.log(
                logging.ERROR if problem == "failing" and is_there else logging.INFO, message
            )
        await self._publish()

    def note_soon(self, problem: str, is_there: bool) -> None:
        """From any thread."""
        asyncio.run_coroutine_threadsafe(self.note(problem, is_there), self._loop)

    async def _publish(self) -> None:
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if self.is_serving else states.NOT_SERVING
        for service in self._services:
            await self.servicer.set(service, state)


# ------------------------------------------------------------------- a patch of grpcio's server
# Why: grpc.aio accepts calls one by one: of each method, one call in several turns of the event
# loop. With 600 streams a turn takes tens of milliseconds, so calls waited unread for seconds, and
# each that was reached was nearly dead. Here several calls of a method are accepted in a turn, what
# has expired is dropped before any work, and the newest calls are started first.
# grpc.aio also decodes the name of an unregistered method as UTF-8 inside the loop that accepts all
# calls. A path with the byte 0xff ends that loop, and with it the server and everybody's calls;
# whoever can connect can do that, with or without a key. A generic handler, the public way to
# handle unknown methods, is asked only after that decoding. All our methods are registered, so
# calls of others are accepted here instead: their names aren't decoded, and they end with
# UNIMPLEMENTED.
# When it can go: when tests/server/api/test_accepting.py passes with a plain `grpc.aio.server()`,
# and the path that tests/server/end_to_end/test_fuzz.py sends gets UNIMPLEMENTED from it. The same
# tests fail where another grpcio needs another patch.
_aio_server: Any = importlib.import_module("grpc.aio._server")
_core: Any = importlib.import_module("grpc._cython.cygrpc")

UNKNOWN_METHOD = "/unknown/unknown"  # instead of the name
NUM_ACCEPTORS = 4  # of each method: calls that are accepted in one turn of the event loop
MAX_STARTS = 4  # in one turn: a call that was started should end before its deadline


class _Core(_core.AioServer):  # type: ignore[misc]
    """Accepts calls. `_make_request_call_future` is how grpc.aio waits for each method's next."""

    def __init__(
        self, loop: Any, guards: Sequence[Any], options: Any, on_expired: Callable[[str], None]
    ) -> None:
        super().__init__(loop, None, (), guards, options, None)
        self._own_loop = loop
        self._guards = tuple(guards)
        self._handlers: dict[str, Any] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._accepted: deque[tuple[str, Any]] = deque()  # not started yet, the oldest first
        self._on_expired = on_expired

    def add_registered_method_handlers(self, handlers: dict[str, Any]) -> None:
        super().add_registered_method_handlers(handlers)
        self._handlers.update(handlers)

    def _make_request_call_future(self, method: bytes | None) -> Any:
        """Of a task that accepts all calls, and ends as grpc.aio expects when the server stops."""
        acceptors = [self._accept(method) for _ in range(1 if method is None else NUM_ACCEPTORS)]
        return asyncio.gather(*acceptors)

    async def _accept(self, method: bytes | None) -> None:
        """Until the server stops: then requesting a call raises."""
        name = UNKNOWN_METHOD if method is None else method.decode()
        while True:
            if method is None:
                state = await self._request_call()
            else:
                state = await self._request_registered_call(method)
            if not self._accepted:
                self._own_loop.call_soon(self._start_some)
            self._accepted.append((name, state))

    def _start_some(self) -> None:
        """Once a turn. Where more calls wait than are started, the newest go first: the oldest have
        the least time left, and all would miss their deadlines by as much as they waited."""
        waiting = self._accepted
        while waiting and self._is_expired(*waiting[0]):
            self._on_expired(waiting.popleft()[0])
        if len(waiting) <= MAX_STARTS:
            while waiting:
                self._start(*waiting.popleft())
            return
        for _ in range(MAX_STARTS):
            self._start(*waiting.pop())
        self._own_loop.call_soon(self._start_some)

    def _is_expired(self, name: str, state: Any) -> bool:
        left_s = _core._ServicerContext(state, None, None, self._own_loop).time_remaining()
        return left_s is not None and left_s <= 0

    def _start(self, name: str, state: Any) -> None:
        loop = self._own_loop
        resolver = _core._MethodResolver([], {} if name == UNKNOWN_METHOD else self._handlers)
        answer = _core._handle_rpc(name, resolver, self._guards, state, loop, False)
        task = loop.create_task(_core._schedule_rpc_coro(answer, state, loop, name))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


class _Server(_aio_server.Server):  # type: ignore[misc]
    """As grpc.aio.server() makes one, with a `_Core` that no method name can end."""

    def __init__(
        self,
        guards: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, Any]],
        on_expired: Callable[[str], None],
    ) -> None:
        self._loop = _core.get_working_loop()
        arguments = _aio_server._augment_channel_arguments(options, None)
        self._server = _Core(self._loop, guards, arguments, on_expired)
