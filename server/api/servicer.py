"""Answers the calls of generation.proto.

Knows: grpc.aio, the order of things in a call. Does not know: the engine, how text is made.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, TypeVar, cast

import grpc
from google.protobuf.message import Message

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.api.calls import Calls, Context, caller_of, raising_context
from quill.server.auth.caller import Caller
from quill.server.engine.dispatcher import Dispatcher
from quill.server.errors import (
    InvalidFieldError,
    SlowReaderError,
    UnavailableError,
    UnsupportedError,
)
from quill.server.loading.instance import ModelInstance
from quill.server.loading.reload import Reloader
from quill.server.protocol.answer import Answer, Chunk, merge
from quill.server.protocol.prompt_fields import PromptReader
from quill.server.protocol.reading_fields import ReadingReader
from quill.server.protocol.requests import Arrival, ParsedRequest, RequestReader
from quill.server.protocol.responses import (
    chunk_message,
    embed_response,
    fill_response,
    logprobs_messages,
    model_message,
    response_message,
    timings_message,
)
from quill.server.protocol.served_model import ServedModel
from quill.server.telemetry.call_record import Record
from quill.server.text.tokenizer import Text

Send = Callable[[Chunk], Awaitable[None]]
_Message = TypeVar("_Message", bound=Message)
_Beside = TypeVar("_Beside")
_Result = TypeVar("_Result")

# A long message is read by another thread: nothing slower than a millisecond on the event loop.
MAX_INLINE_BYTES = 2048
MAX_INLINE_VECTORS = 8  # nor are more written there
MAX_DETOKENIZED = 2**17  # tokens
# How long before a client's deadline a request is stopped: a share of its time, and at most.
MARGIN = 0.1
MAX_MARGIN_S = 0.1


class _Call(NamedTuple):
    record: Record
    instance: ModelInstance
    caller: Caller

    @property
    def served(self) -> ServedModel:
        return self.instance.served


class TextGeneration(pb_grpc.TextGenerationServicer):
    """A call keeps to the instance that served when it began."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        reloader: Reloader,
        calls: Calls,
        write_timeout_s: float,
        share_cache: bool,
    ) -> None:
        self._dispatcher = dispatcher
        self._reloader = reloader
        self._calls = calls
        self._write_timeout_s = write_timeout_s
        self._share_cache = share_cache

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with self._call("Generate", context) as call:
            served = call.served
            arrival = self._arrival(call, context)
            parsed = await _read(RequestReader(served).read_generate, request, arrival)
            chunks = await self._collect(parsed, call)
            return response_message(merge(chunks, parsed.request.num_sequences), served.text)

    async def GenerateStream(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        # It writes instead of yielding: a client that leaves during a write is noticed at once.
        async with self._call("GenerateStream", context) as call:
            served = call.served
            arrival = self._arrival(call, context)
            parsed = await _read(RequestReader(served).read_generate, request, arrival)

            async def send(chunk: Chunk) -> None:
                await self._write(chunk_message(chunk, served.text), context)

            await self._answer(parsed, call, send)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        async with self._call("Score", context) as call:
            served = call.served
            arrival = self._arrival(call, context)
            parsed = await _read(RequestReader(served).read_score, request, arrival)
            chunks = await self._collect(parsed, call)
            (whole,) = merge(chunks, 1)
            assert whole.finish is not None
            return pb.ScoreResponse(
                log_likelihood=sum(each.logprob or 0.0 for each in whole.prompt_logprobs),
                tokens=logprobs_messages(whole.prompt_logprobs, served.text),
                timings=timings_message(whole.finish.timings),
                request_id=call.record.request_id,
            )

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        async with self._call("Embed", context) as call:
            arrival = self._arrival(call, context)
            parsed = await _read(ReadingReader(call.served).read_embed, request, arrival)
            assert parsed.request.reading is not None
            num_texts = call.record.num_texts = len(parsed.request.reading.texts)
            (whole,) = merge(await self._collect(parsed, call), 1)
            if num_texts <= MAX_INLINE_VECTORS:
                return embed_response(whole, parsed, call.served)
            return await asyncio.to_thread(embed_response, whole, parsed, call.served)

    async def FillMask(self, request: pb.FillMaskRequest, context: Context) -> pb.FillMaskResponse:
        async with self._call("FillMask", context) as call:
            arrival = self._arrival(call, context)
            parsed = await _read(ReadingReader(call.served).read_fill, request, arrival)
            (whole,) = merge(await self._collect(parsed, call), 1)
            return fill_response(whole, parsed, call.served)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with self._call("Tokenize", context) as call:
            return await _read(_tokenize, request, call.served)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        async with self._call("Detokenize", context) as call:
            return await _read(_detokenize, request, call.served)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.Model:
        async with self._call("GetModel", context) as call:
            return model_message(call.served)

    @raising_context
    async def _call(self, method: str, context: Context) -> AsyncIterator[_Call]:
        async with self._calls.call(method, context) as record:
            if self._reloader.instance is None:
                raise UnavailableError(
                    "the server is loading its model. Try again in a few seconds"
                )
            with self._reloader.instance.call() as instance:
                yield _Call(record, instance, caller_of(context))

    def _arrival(self, call: _Call, context: Context) -> Arrival:
        record = call.record
        return Arrival(
            request_id=record.request_id,
            deadline_s=_deadline_s(context),
            owner=record.caller,
            cache_scope="" if self._share_cache else record.caller,
            max_prompt_tokens=call.caller.max_prompt_tokens,
        )

    async def _answer(self, parsed: ParsedRequest, call: _Call, send: Send) -> None:
        record, request = call.record, parsed.request
        record.submitted_s = time.monotonic()
        with (
            self._calls.quotas.tokens(call.caller, request.num_prompt) as spending,
            self._dispatcher.serve(request, call.instance.engine) as inbox,
        ):
            answer = Answer(parsed, call.served.text, inbox.end)
            try:
                while not answer.is_over:
                    chunks = answer.take(await inbox.take())
                    spending.note(answer.num_generated)
                    for chunk in chunks:
                        if chunk.finish is not None:
                            record.note(chunk.finish)
                        await send(chunk)
            finally:  # a client that left has had its tokens too
                if answer.num_cached is not None:
                    spending.is_read = True
                    spending.note(answer.num_generated)
                    record.num_prompt = request.num_prompt
                    record.num_cached = answer.num_cached
                    record.num_generated = answer.num_generated

    async def _collect(self, parsed: ParsedRequest, call: _Call) -> list[Chunk]:
        chunks: list[Chunk] = []

        async def send(chunk: Chunk) -> None:
            chunks.append(chunk)

        await self._answer(parsed, call, send)
        return chunks

    async def _write(self, message: pb.GenerateChunk, context: Context) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await context.write(message)
        except TimeoutError:
            reason = f"nothing was read for {self._write_timeout_s:g} s"
            raise SlowReaderError(reason) from None
        except grpc.aio.InternalError as error:
            # The connection broke under the write: there is nobody left to be told.
            raise asyncio.CancelledError from error


async def _read(
    read: Callable[[_Message, _Beside], _Result], message: _Message, beside: _Beside
) -> _Result:
    if message.ByteSize() <= MAX_INLINE_BYTES:
        return read(message, beside)
    return await asyncio.to_thread(read, message, beside)


def _deadline_s(context: Context) -> float | None:
    """A little before the client's own, so that what was made still gets there."""
    left_s = cast("float | None", context.time_remaining())  # the stub forgets None
    if left_s is None:
        return None
    return time.monotonic() + left_s - min(MAX_MARGIN_S, MARGIN * left_s)


def _text(served: ServedModel) -> Text:
    if served.text is None:
        raise UnsupportedError("this model has no tokenizer: it takes and gives token ids only")
    return served.text


def _tokenize(message: pb.TokenizeRequest, served: ServedModel) -> pb.TokenizeResponse:
    text = _text(served)
    whole = message.add_special_tokens if message.HasField("add_special_tokens") else True
    ids = PromptReader(served).encode(message.text, "text", whole)
    return pb.TokenizeResponse(token_ids=ids, tokens=[text.piece(id) for id in ids])


def _detokenize(message: pb.DetokenizeRequest, served: ServedModel) -> pb.DetokenizeResponse:
    if len(message.token_ids) > MAX_DETOKENIZED:
        rule = f"at most {MAX_DETOKENIZED} are taken at once"
        raise InvalidFieldError("token_ids", f"has {len(message.token_ids)} tokens; {rule}")
    PromptReader(served).check_ids("token_ids", message.token_ids)
    skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
    return pb.DetokenizeResponse(text=_text(served).decode(message.token_ids, skip))
