"""Answers KServe v2's calls, and Triton's additions to them.

Knows: grpc.aio, the order of things in a call. Does not know: tensors, the engine.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from importlib import metadata

from prometheus_client import CollectorRegistry

from quill.protos import kserve_pb2 as kserve
from quill.protos import kserve_pb2_grpc as kserve_grpc
from quill.protos.generation_pb2 import GenerateChunk
from quill.server.api.answering import Context, answering, origin_of, write
from quill.server.errors import (
    InvalidFieldError,
    NotFoundError,
    RequestError,
    SlowReaderError,
    UnavailableError,
)
from quill.server.kserve import model_card
from quill.server.kserve.model_card import ALIAS, VERSION
from quill.server.kserve.requests import Inference, read_inference, timeout_s
from quill.server.kserve.responses import Answering, failure
from quill.server.kserve.statistics import statistics
from quill.server.kserve.tensors import MAX_NAME
from quill.server.protocol.served_model import ServedModel
from quill.server.service.call import Call, read_message
from quill.server.service.origin import Origin
from quill.server.service.service import Service

EXTENSIONS = ("model_configuration", "statistics", "parameters", "binary_tensor_data")
# Of one stream at once; others wait to be read. As many calls as a connection may have.
MAX_REQUESTS = 1024
Parts = AsyncIterator[kserve.ModelInferRequest]


class InferenceService(kserve_grpc.GRPCInferenceServiceServicer):
    def __init__(
        self,
        service: Service,
        registry: CollectorRegistry,
        is_serving: Callable[[], bool],
        write_timeout_s: float,
    ) -> None:
        self._service = service
        self._registry = registry
        self._is_serving = is_serving
        self._write_timeout_s = write_timeout_s

    async def ServerLive(
        self, request: kserve.ServerLiveRequest, context: Context
    ) -> kserve.ServerLiveResponse:
        return kserve.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: kserve.ServerReadyRequest, context: Context
    ) -> kserve.ServerReadyResponse:
        return kserve.ServerReadyResponse(ready=self._is_serving())

    async def ServerMetadata(
        self, request: kserve.ServerMetadataRequest, context: Context
    ) -> kserve.ServerMetadataResponse:
        return kserve.ServerMetadataResponse(
            name="quill", version=metadata.version("quill"), extensions=EXTENSIONS
        )

    async def ModelReady(
        self, request: kserve.ModelReadyRequest, context: Context
    ) -> kserve.ModelReadyResponse:
        async with answering("ModelReady", context, "kserve") as origin:
            try:
                async with self._service.call(origin) as call:
                    check_model(request.name, request.version, call.served)
            except (NotFoundError, UnavailableError):
                return kserve.ModelReadyResponse(ready=False)
            return kserve.ModelReadyResponse(ready=self._is_serving())

    async def ModelMetadata(
        self, request: kserve.ModelMetadataRequest, context: Context
    ) -> kserve.ModelMetadataResponse:
        async with (
            answering("ModelMetadata", context, "kserve") as origin,
            self._service.call(origin) as call,
        ):
            check_model(request.name, request.version, call.served)
            return model_card.metadata(request.name)

    async def ModelConfig(
        self, request: kserve.ModelConfigRequest, context: Context
    ) -> kserve.ModelConfigResponse:
        async with (
            answering("ModelConfig", context, "kserve") as origin,
            self._service.call(origin) as call,
        ):
            check_model(request.name, request.version, call.served)
            return kserve.ModelConfigResponse(config=model_card.config(request.name))

    async def ModelStatistics(
        self, request: kserve.ModelStatisticsRequest, context: Context
    ) -> kserve.ModelStatisticsResponse:
        async with (
            answering("ModelStatistics", context, "kserve") as origin,
            self._service.call(origin) as call,
        ):
            name = request.name or call.served.manifest.name
            check_model(name, request.version, call.served)
            return kserve.ModelStatisticsResponse(model_stats=[statistics(self._registry, name)])

    async def ModelInfer(
        self, request: kserve.ModelInferRequest, context: Context
    ) -> kserve.ModelInferResponse:
        async with (
            answering("ModelInfer", context, "kserve") as origin,
            self._service.call(_within(origin, request)) as call,
        ):
            inference = await _read(request, call)
            if inference.stream:
                raise InvalidFieldError("stream", "is true; ModelInfer answers once. Use streams")
            return await _whole(inference, call)

    async def ModelStreamInfer(  # type: ignore[override]
        self, request_iterator: Parts, context: Context
    ) -> None:
        # It writes instead of yielding: requests of one stream are answered side by side.
        responses = _Responses(context, self._write_timeout_s)
        places = asyncio.Semaphore(MAX_REQUESTS)
        async with (
            answering("ModelStreamInfer", context, "kserve"),
            _first_error(),
            asyncio.TaskGroup() as group,
        ):
            async for request in request_iterator:
                await places.acquire()
                origin = _within(origin_of("ModelStreamInfer", context, "kserve"), request)
                task = group.create_task(self._answer(request, origin, responses))
                task.add_done_callback(lambda _: places.release())

    async def _answer(
        self, request: kserve.ModelInferRequest, origin: Origin, responses: "_Responses"
    ) -> None:
        try:
            async with self._service.call(origin) as call:
                inference = await _read(request, call)
                if inference.stream:
                    await _parts(inference, call, responses)
                else:
                    await responses.write(await _whole(inference, call))
        except SlowReaderError:
            raise  # nobody would hear it: the stream is over for all its requests
        except RequestError as error:
            await responses.send(failure(request, error))


class _Responses:
    """A stream's answers. gRPC takes one at a time."""

    def __init__(self, context: Context, write_timeout_s: float) -> None:
        self._context = context
        self._write_timeout_s = write_timeout_s
        self._writing = asyncio.Lock()

    async def write(self, response: kserve.ModelInferResponse) -> None:
        await self.send(kserve.ModelStreamInferResponse(infer_response=response))

    async def send(self, response: kserve.ModelStreamInferResponse) -> None:
        async with self._writing:
            await write(response, self._context, self._write_timeout_s)


def check_model(name: str, version: str, served: ServedModel) -> None:
    own = served.manifest.name
    if name not in (own, ALIAS) or version not in ("", VERSION):
        given = f"the model {name[:MAX_NAME]!r}, version {version[:MAX_NAME]!r}, isn't here"
        rule = f"there is {own!r}, which is also {ALIAS!r}, in version {VERSION!r}"
        raise NotFoundError(f"{given}; {rule}")


def _within(origin: Origin, request: kserve.ModelInferRequest) -> Origin:
    """Triton's clients may give each request a time of its own."""
    wanted_s = timeout_s(request)
    if wanted_s is None:
        return origin
    end_s = time.monotonic() + wanted_s
    if origin.deadline_s is not None:
        end_s = min(end_s, origin.deadline_s)
    return replace(origin, deadline_s=end_s)


async def _read(request: kserve.ModelInferRequest, call: Call) -> Inference:
    served = call.served
    check_model(request.model_name, request.model_version, served)
    return await read_message(read_inference, request, not served.is_translator)


async def _whole(inference: Inference, call: Call) -> kserve.ModelInferResponse:
    with _as_written(inference):
        parsed = await call.read(inference.message)
    return Answering(inference).whole(await call.generate(parsed))


async def _parts(inference: Inference, call: Call, responses: _Responses) -> None:
    with _as_written(inference):
        parsed = await call.read(inference.message)
    answer = Answering(inference)

    async def send(chunk: GenerateChunk) -> None:
        await responses.write(answer.part(chunk))

    await call.generate_stream(parsed, send)


@contextlib.contextmanager
def _as_written(inference: Inference) -> Iterator[None]:
    try:
        yield
    except InvalidFieldError as error:
        raise inference.as_written(error) from error


@contextlib.asynccontextmanager
async def _first_error() -> AsyncIterator[None]:
    """Of a group of tasks, by itself: it ends the stream."""
    errors: list[Exception] = []
    try:
        yield
    except* RequestError as group:
        errors.extend(group.exceptions)
    if errors:
        raise errors[0]
