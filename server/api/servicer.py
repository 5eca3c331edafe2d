"""Answers the calls of generation.proto over gRPC.

Knows: grpc.aio. Does not know: what calls do.
"""

from contextlib import AbstractAsyncContextManager

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.api.answering import Context, answering, telling_load, write
from quill.server.service.origin import Origin
from quill.server.service.service import Service


class TextGeneration(pb_grpc.TextGenerationServicer):
    def __init__(self, service: Service, write_timeout_s: float) -> None:
        self._service = service
        self._write_timeout_s = write_timeout_s

    def _answering(
        self, method: str, context: Context
    ) -> AbstractAsyncContextManager[Origin, None]:
        """For calls that the engine has to do with."""
        service = self._service
        return telling_load(method, context, lambda: service.num_requests, self._write_timeout_s)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with self._answering("Generate", context) as origin:
            return await self._service.generate(request, origin)

    async def GenerateStream(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        # It writes instead of yielding: a client that leaves during a write is noticed at once.
        async def send(chunk: pb.GenerateChunk) -> None:
            await write(chunk, context, self._write_timeout_s)

        async with self._answering("GenerateStream", context) as origin:
            await self._service.generate_stream(request, origin, send)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        async with self._answering("Score", context) as origin:
            return await self._service.score(request, origin)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        async with self._answering("Embed", context) as origin:
            return await self._service.embed(request, origin)

    async def FillMask(self, request: pb.FillMaskRequest, context: Context) -> pb.FillMaskResponse:
        async with self._answering("FillMask", context) as origin:
            return await self._service.fill_mask(request, origin)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with answering("Tokenize", context) as origin:
            return await self._service.tokenize(request, origin)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        async with answering("Detokenize", context) as origin:
            return await self._service.detokenize(request, origin)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.Model:
        async with answering("GetModel", context) as origin:
            return await self._service.get_model(origin)
