"""Answers KServe v2's calls, and Triton's additions to them.

Knows: grpc.aio, the names of metrics, the order of things in a call. Does not know: tensors.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from importlib import metadata

from prometheus_client import CollectorRegistry

from quill.protos import kserve_pb2 as kserve
from quill.protos import kserve_pb2_grpc as kserve_grpc
from quill.server.api.grpc_calls import Context, answering, request_context, write
from quill.server.errors import (
    InvalidFieldError,
    NotFoundError,
    RequestError,
    SlowReaderError,
    UnavailableError,
)
from quill.server.frontend.answer import Chunk
from quill.server.frontend.call import (
    MAX_INLINE_BYTES,
    Call,
    Calls,
    RequestContext,
    inline_or_thread,
    raising_context,
)
from quill.server.frontend.served_model import ServedModel
from quill.server.kserve import tensors
from quill.server.kserve.inference import (
    Inference,
    Responses,
    failure,
    read_inference,
    timeout_s,
)
from quill.server.kserve.tensors import MAX_NAME, VERSION

EXTENSIONS = ("model_configuration", "statistics", "parameters", "binary_tensor_data")
# Of one stream at once; others wait to be read. As many calls as a connection may have.
MAX_REQUESTS = 1024
Parts = AsyncIterator[kserve.ModelInferRequest]


class InferenceService(kserve_grpc.GRPCInferenceServiceServicer):
    def __init__(
        self,
        calls: Calls,
        registry: Callable[[], Awaitable[CollectorRegistry]],
        is_serving: Callable[[], bool],
        write_timeout_s: float,
    ) -> None:
        self._calls = calls
        self._registry = registry
        self._is_serving = is_serving
        self._write_timeout_s = write_timeout_s

    @raising_context
    async def _call(self, method: str, context: Context) -> AsyncIterator[Call]:
        async with answering(method, context, "kserve") as opened, self._calls.open(opened) as call:
            yield call

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
        async with answering("ModelReady", context, "kserve") as opened:
            try:
                async with self._calls.open(opened) as call:
                    check_model(request.name, request.version, call.served)
            except (NotFoundError, UnavailableError):
                return kserve.ModelReadyResponse(ready=False)
            return kserve.ModelReadyResponse(ready=self._is_serving())

    async def ModelMetadata(
        self, request: kserve.ModelMetadataRequest, context: Context
    ) -> kserve.ModelMetadataResponse:
        async with self._call("ModelMetadata", context) as call:
            check_model(request.name, request.version, call.served)
            return tensors.metadata(request.name)

    async def ModelConfig(
        self, request: kserve.ModelConfigRequest, context: Context
    ) -> kserve.ModelConfigResponse:
        async with self._call("ModelConfig", context) as call:
            check_model(request.name, request.version, call.served)
            return kserve.ModelConfigResponse(config=tensors.config(request.name))

    async def ModelStatistics(
        self, request: kserve.ModelStatisticsRequest, context: Context
    ) -> kserve.ModelStatisticsResponse:
        async with self._call("ModelStatistics", context) as call:
            name = request.name or call.served.name
            check_model(name, request.version, call.served)
            return kserve.ModelStatisticsResponse(
                model_stats=[statistics(await self._registry(), name)]
            )

    async def ModelInfer(
        self, request: kserve.ModelInferRequest, context: Context
    ) -> kserve.ModelInferResponse:
        async with (
            answering("ModelInfer", context, "kserve") as opened,
            self._calls.open(_with_timeout(opened, request)) as call,
        ):
            inference = await _read(request, call)
            if inference.stream:
                raise InvalidFieldError("stream", "is true; ModelInfer answers once. Use streams")
            return await _whole(inference, call, request.ByteSize())

    async def ModelStreamInfer(  # type: ignore[override]
        self, request_iterator: Parts, context: Context
    ) -> None:
        # It writes instead of yielding: requests of one stream are answered side by side.
        responses = _Stream(context, self._write_timeout_s)
        places = asyncio.Semaphore(MAX_REQUESTS)
        async with (
            answering("ModelStreamInfer", context, "kserve"),
            _first_error(),
            asyncio.TaskGroup() as group,
        ):
            async for request in request_iterator:
                await places.acquire()
                opened = request_context("ModelStreamInfer", context, "kserve")
                opened = _with_timeout(opened, request)
                task = group.create_task(self._answer(request, opened, responses))
                task.add_done_callback(lambda _: places.release())

    async def _answer(
        self, request: kserve.ModelInferRequest, opened: RequestContext, responses: "_Stream"
    ) -> None:
        try:
            async with self._calls.open(opened) as call:
                inference = await _read(request, call)
                if inference.stream:
                    await _parts(inference, call, request.ByteSize(), responses)
                else:
                    await responses.write(await _whole(inference, call, request.ByteSize()))
        except SlowReaderError:
            raise  # the stream is over for all its requests
        except RequestError as error:
            await responses.send(failure(request, error))


class _Stream:
    """A stream's responses. gRPC takes one at a time."""

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
    if name not in served.names or version not in ("", VERSION):
        given = f"the model {name[:MAX_NAME]!r}, version {version[:MAX_NAME]!r}, isn't here"
        others = ", ".join(map(repr, served.names[1:]))
        rule = f"there is {served.name!r}, which is also {others}, in version {VERSION!r}"
        raise NotFoundError(f"{given}; {rule}")


def _with_timeout(opened: RequestContext, request: kserve.ModelInferRequest) -> RequestContext:
    """Triton's clients may give each request a timeout of its own."""
    wanted_s = timeout_s(request)
    if wanted_s is None:
        return opened
    end_s = time.monotonic() + wanted_s
    if opened.deadline_s is not None:
        end_s = min(end_s, opened.deadline_s)
    return replace(opened, deadline_s=end_s)


async def _read(request: kserve.ModelInferRequest, call: Call) -> Inference:
    served = call.served
    check_model(request.model_name, request.model_version, served)
    continues = not served.is_translator
    is_long = request.ByteSize() > MAX_INLINE_BYTES
    return await inline_or_thread(is_long, read_inference, request, continues)


async def _whole(inference: Inference, call: Call, num_bytes: int) -> kserve.ModelInferResponse:
    parsed = await call.read(lambda: inference.spec, num_bytes)
    responses = Responses(inference, parsed.request.num_sequences, call.served.text)
    return responses.whole(await call.generate(parsed))


async def _parts(inference: Inference, call: Call, num_bytes: int, stream: "_Stream") -> None:
    parsed = await call.read(lambda: inference.spec, num_bytes)
    responses = Responses(inference, parsed.request.num_sequences, call.served.text)

    async def send(chunk: Chunk) -> None:
        await stream.write(responses.part(chunk))

    await call.stream(parsed, send)


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


_Labels = Mapping[str, str]


class _Numbers:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._samples = [each for metric in registry.collect() for each in metric.samples]

    def total(self, name: str, counts: Callable[[_Labels], bool] = lambda _: True) -> float:
        """Over all labels that count."""
        return sum(s.value for s in self._samples if s.name == name and counts(s.labels))

    def duration(
        self, name: str, counts: Callable[[_Labels], bool] = lambda _: True
    ) -> kserve.StatisticDuration:
        count, seconds = self.total(f"{name}_count", counts), self.total(f"{name}_sum", counts)
        return kserve.StatisticDuration(count=round(count), ns=round(1e9 * seconds))


def statistics(registry: CollectorRegistry, name: str) -> kserve.ModelStatistics:
    numbers = _Numbers(registry)
    calls, steps = "quill_engine_call_seconds", "quill_step_time_seconds"
    success = numbers.duration(calls, lambda labels: labels["outcome"] == "OK")
    hits, misses = (
        kserve.StatisticDuration(count=round(numbers.total(f"quill_prefix_cache_{each}_total")))
        for each in ("hits", "misses")
    )
    return kserve.ModelStatistics(
        name=name,
        version=VERSION,
        inference_count=success.count,
        execution_count=round(numbers.total(f"{steps}_count")),
        inference_stats=kserve.InferStatistics(
            success=success,
            fail=numbers.duration(calls, lambda labels: labels["outcome"] != "OK"),
            queue=numbers.duration("quill_queue_time_seconds"),
            # perf_analyzer wants these three to count the same.
            compute_input=kserve.StatisticDuration(count=success.count),
            compute_infer=kserve.StatisticDuration(
                count=success.count, ns=numbers.duration(steps).ns
            ),
            compute_output=kserve.StatisticDuration(count=success.count),
            cache_hit=hits,
            cache_miss=misses,
        ),
    )
