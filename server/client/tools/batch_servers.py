"""The servers of a batch: the SDK's client over gRPC, and HTTP for lines of OpenAI's files.

Knows: both, and when a line is retried. Does not know: files, order.

While any server answers, a line is retried until it has its answer: the same seed gives the same
answer on every server.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, TypeVar

import grpc

from quill.protos import generation_pb2 as pb
from quill.server.addresses import HTTP_OFFSET, write_address
from quill.server.client.access import Access
from quill.server.client.async_client import AsyncClient
from quill.server.client.balancer import Balancer
from quill.server.client.errors import CallError
from quill.server.client.retry import Retries, is_retryable
from quill.server.client.target import read_target
from quill.server.client.tools.batch_lines import Json, Request, Response
from quill.server.client.tools.http_client import HttpClient, HttpResponse, split_address
from quill.server.errors import ServerError

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_MODEL_TIMEOUT_S = 10.0
_BACKOFF = Retries()
_MAX_INTERNAL_ERRORS = 2  # a step that failed may have been another request's fault
# Errors that every other line would have, too.
_FOR_ALL = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_HTTP_CODES: dict[int, grpc.StatusCode] = {
    HTTPStatus.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    HTTPStatus.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.INTERNAL_SERVER_ERROR: grpc.StatusCode.INTERNAL,
    HTTPStatus.BAD_GATEWAY: grpc.StatusCode.UNAVAILABLE,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: grpc.StatusCode.UNAVAILABLE,
}


class StoppedError(ServerError):
    """The batch can't go on for now. The answers that were written are kept."""


class BatchServers:
    """Belongs to one event loop."""

    def __init__(
        self,
        address: str,
        http_addresses: Sequence[str],
        access: Access,
        concurrency: int,
        *,
        unavailable_timeout_s: float = 300.0,
        timeout_s: float | None = None,
    ) -> None:
        """`http_addresses`: none: beside the gRPC ports. `timeout_s`: of one call."""
        self._access, self._timeout_s = access, timeout_s
        self._unavailable_timeout_s = unavailable_timeout_s
        target = read_target(address)
        if target.is_watched and "?" not in address:
            address += "?balance=least"
        # Each server once; when none of them takes a call, `_retry` waits.
        num_others = 3 if target.name else len(target.servers) - 1
        self._client = AsyncClient(address, Retries(max_retries=num_others), access=access)
        self._servers = target.servers or (address,)
        http = http_addresses or [_http_address(each) for each in target.servers]
        for each in http:
            access.credentials(each)  # raises if the API key would be sent in plaintext
        tls = access.http_context() if access.uses_tls else None
        headers = {"Content-Type": "application/json", **dict(access.metadata)}
        self._http = {each: HttpClient(each, tls, headers) for each in http}
        self._http_balancer = Balancer("least")
        self._http_balancer.set_servers(self._http, are_serving=True)
        self._threads = ThreadPoolExecutor(concurrency)
        self._answered_s = time.monotonic()  # when any server answered
        self._is_available = True

    async def __aenter__(self) -> "BatchServers":
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._http.values():
            client.cancel()
        self._threads.shutdown(cancel_futures=True)
        for client in self._http.values():
            client.close()
        await self._client.close()

    async def model(self) -> str:
        """Of all servers: answers of two models in one file would be useless."""
        results = await asyncio.gather(*map(self._read_model, self._servers))
        found = {address: name for address, name in results if isinstance(name, str)}
        if not found:
            error = results[0][1]
            assert isinstance(error, CallError)
            raise error
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{address} {name}" for address, name in found.items())
            raise StoppedError(f"the servers serve different models: {listed}. Give equal ones")
        return next(iter(found.values()))

    async def _read_model(self, address: str) -> tuple[str, str | CallError]:
        once = Retries(max_retries=0)
        async with AsyncClient(address, once, access=self._access) as client:
            try:
                model = await client.model(timeout_s=_MODEL_TIMEOUT_S)
            except CallError as error:
                logger.warning("%s: %s", address, error)
                return address, error
        return address, f"{model.name} ({model.precision})"

    async def call(self, request: Request) -> Response:
        """Errors are CallErrors about this request alone, or one StoppedError."""

        async def send() -> Response:
            if isinstance(request, pb.EmbedRequest):
                return await self._client.embed_request(request, self._timeout_s)
            return _complete(await self._client.generate_request(request, self._timeout_s))

        return await self._retry(send, lambda: False)

    async def post(self, path: str, body: Json) -> tuple[int, Json]:
        """The same over HTTP: the status, which may be an error of this request, and the body."""
        if not self._http:
            raise StoppedError(
                "lines of OpenAI's files go to the servers' HTTP ports: give them with --http"
            )
        loop, balancer, failed = asyncio.get_running_loop(), self._http_balancer, set[str]()

        async def send() -> tuple[int, Json]:
            address = balancer.begin(None, failed if balancer.has_other(failed) else frozenset())
            failed.add(address)  # where it goes well this doesn't matter
            try:
                return await loop.run_in_executor(self._threads, self._post, address, path, body)
            finally:
                balancer.end(address)

        return await self._retry(send, lambda: balancer.has_other(failed))

    def _post(self, address: str, path: str, body: Json) -> tuple[int, Json]:
        content, timeout_s = json.dumps(body).encode(), self._timeout_s
        try:
            response = self._http[address].request("POST", path, content, timeout_s)
        except TimeoutError as error:
            reason = f"no response for {timeout_s:g} s"
            raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, reason) from error
        except (OSError, HTTPException) as error:
            reason = f"HTTP at {address} fails: {error}"
            raise CallError(grpc.StatusCode.UNAVAILABLE, reason) from error
        return _read_reply(response)

    async def _retry(
        self, send: Callable[[], Awaitable[_Result]], has_other: Callable[[], bool]
    ) -> _Result:
        num_tried = num_internal = 0
        while True:
            try:
                result = await send()
            except CallError as error:
                is_internal = error.code is grpc.StatusCode.INTERNAL and not error.is_broken
                num_internal += is_internal
                if is_internal and num_internal <= _MAX_INTERNAL_ERRORS:
                    continue
                delay_s = self._delay_s(error, num_tried)
                num_tried += 1
            else:
                self._answered_s, self._is_available = time.monotonic(), True
                return result
            await asyncio.sleep(0.0 if has_other() else delay_s)

    def _delay_s(self, error: CallError, num_tried: int) -> float:
        """Before a retry. Raises if a retry is of no use."""
        if error.code in _FOR_ALL or error.is_lasting:
            raise StoppedError(str(error)) from error
        now_s, timeout_s = time.monotonic(), self._unavailable_timeout_s
        if not is_retryable(error) or error.retry_after_s is not None:
            self._answered_s = now_s
        elif now_s - self._answered_s > timeout_s:
            raise StoppedError(
                f"no server has answered for {timeout_s:g} s; the last error: {error}"
            ) from error
        elif self._is_available:
            self._is_available = False
            logger.warning("waiting up to %g s for a server: %s", timeout_s, error.reason)
        delay_s = _BACKOFF.delay_s(error, num_tried, None)
        if delay_s is None:
            raise error
        return delay_s


def _complete(response: pb.GenerateResponse) -> pb.GenerateResponse:
    """A response that the deadline has cut would differ the next time."""
    if any(each.finish_reason == pb.FINISH_REASON_DEADLINE for each in response.sequences):
        reason = "the answer wasn't complete before the deadline"
        raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, reason)
    return response


def _http_address(address: str) -> str:
    host, port = split_address(address)
    return write_address(host, port + HTTP_OFFSET)


def _read_reply(response: HttpResponse) -> tuple[int, Json]:
    try:
        found: Any = json.loads(response.content)
    except ValueError:
        found = None
    body = found if isinstance(found, dict) else {}
    code = _HTTP_CODES.get(response.status)
    if code is None:
        return response.status, body
    error = body.get("error")
    reason = str(error.get("message")) if isinstance(error, dict) else f"HTTP {response.status}"
    raise CallError(code, reason, retry_after_s=_retry_after_s(response))


def _retry_after_s(response: HttpResponse) -> float | None:
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = response.headers.get(name, "")
        if value.isdecimal():
            return int(value) / unit
    return None
