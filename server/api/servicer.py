"""Answers the calls of generation.proto over gRPC: parses messages, opens calls, prints results.

Knows: grpc.aio, who may reload. Does not know: what calls do, how a bundle is loaded.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.api import messages
from quill.server.api.grpc_calls import Context, answering, reporting_load, write
from quill.server.errors import ForbiddenError, UnimplementedError
from quill.server.frontend.answer import Chunk
from quill.server.frontend.call import (
    MAX_INLINE_EMBEDDINGS,
    MAX_INLINE_TOKENS,
    Call,
    Calls,
    has_many_logprobs,
    inline_or_thread,
    raising_context,
)
from quill.server.frontend.reader import RequestReader
from quill.server.frontend.served_model import ServedModel


class TextGeneration(pb_grpc.TextGenerationServicer):
    def __init__(self, calls: Calls, write_timeout_s: float) -> None:
        self._calls = calls
        self._write_timeout_s = write_timeout_s

    @raising_context
    async def _engine_call(self, method: str, context: Context) -> AsyncIterator[Call]:
        """A call with requests for the engine, whose load its client may ask for."""
        calls, timeout_s = self._calls, self._write_timeout_s
        async with (
            reporting_load(method, context, lambda: calls.num_requests, timeout_s) as opened,
            calls.open(opened) as call,
        ):
            yield call

    @raising_context
    async def _call(self, method: str, context: Context) -> AsyncIterator[Call]:
        async with answering(method, context) as opened, self._calls.open(opened) as call:
            yield call

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with self._engine_call("Generate", context) as call:
            parsed = await call.read(partial(messages.read_generate, request), request.ByteSize())
            result, text = await call.generate(parsed), call.served.text
            is_long = has_many_logprobs(result.sequences)
            return await inline_or_thread(is_long, messages.response_message, result, text)

    async def GenerateStream(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        # It writes instead of yielding: a client that leaves during a write is noticed at once.
        async with self._engine_call("GenerateStream", context) as call:
            text = call.served.text

            async def send(chunk: Chunk) -> None:
                is_long = has_many_logprobs((chunk,))
                message = await inline_or_thread(is_long, messages.chunk_message, chunk, text)
                await write(message, context, self._write_timeout_s)

            parsed = await call.read(partial(messages.read_generate, request), request.ByteSize())
            await call.stream(parsed, send)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        async with self._engine_call("Score", context) as call:
            parse = partial(messages.read_score, request)
            _, whole = await call.read_only(RequestReader.read_score, parse, request.ByteSize())
            is_long, text = has_many_logprobs((whole,)), call.served.text
            return await inline_or_thread(is_long, messages.score_response, whole, text)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        async with self._engine_call("Embed", context) as call:
            parse = partial(messages.read_embed, request)
            found = await call.read_only(RequestReader.read_embed, parse, request.ByteSize())
            is_long = len(request.inputs) > MAX_INLINE_EMBEDDINGS
            return await inline_or_thread(is_long, messages.embed_response, *found, call.served)

    async def FillMask(self, request: pb.FillMaskRequest, context: Context) -> pb.FillMaskResponse:
        async with self._engine_call("FillMask", context) as call:
            parse = partial(messages.read_fill_mask, request)
            found = await call.read_only(RequestReader.read_fill_mask, parse, request.ByteSize())
            return messages.fill_mask_response(*found, call.served)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with self._call("Tokenize", context) as call:
            has = request.HasField("add_special_tokens")
            special, text = request.add_special_tokens or not has, call.text()
            ids = await call.tokenize(request.text, "text", special)
            is_long = len(ids) > MAX_INLINE_TOKENS
            return await inline_or_thread(is_long, messages.tokenize_response, ids, text)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        async with self._call("Detokenize", context) as call:
            skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
            text = await call.detokenize(list(request.token_ids), "token_ids", skip)
            return pb.DetokenizeResponse(text=text)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.Model:
        async with self._call("GetModel", context) as call:
            return messages.model_message(call.served)


class Administration(pb_grpc.AdministrationServicer):
    """For operators. Without API keys it only says why it isn't offered."""

    def __init__(self, calls: Calls, reload: Callable[[], Awaitable[ServedModel]] | None) -> None:
        """Without `reload` no caller can be told from another, so none may reload."""
        self._calls = calls
        self._reload = reload

    async def Reload(self, request: pb.ReloadRequest, context: Context) -> pb.ReloadResponse:
        async with answering("Reload", context) as call, self._calls.record(call):
            if self._reload is None:
                raise UnimplementedError(
                    "this server was started without --api-keys, so it knows no administrator. "
                    "Send its process SIGHUP to reload, or start it with --api-keys FILE and call "
                    "with a key that `quill keys add FILE NAME --admin` made"
                )
            if not call.caller.admin:
                raise ForbiddenError(
                    f"the API key {call.caller.name} may not reload. `quill keys add --admin` "
                    "makes one that may"
                )
            # Once begun it goes on, even if the caller leaves.
            served = await asyncio.shield(asyncio.ensure_future(self._reload()))
            return pb.ReloadResponse(model=messages.model_message(served))
