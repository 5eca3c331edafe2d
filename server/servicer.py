"""Answers the calls of generation.proto.

Knows: grpc.aio, the order of things in a call. Does not know: the engine, how text is made.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as pb_grpc
from server.answer import Answer, Chunk, merge
from server.caller import ANYBODY, CALLER, Caller
from server.desk import Desk
from server.errors import (
    RequestError,
    SlowReaderError,
    StepError,
    UnavailableError,
    UnsupportedError,
    status_name,
)
from server.prompts import check_ids
from server.quota import Quotas
from server.record import Record
from server.served import Served
from server.status import grpc_status
from server.text import Text
from server.validation import Arrival, Asked, read_generate, read_score
from server.wire import (
    chunk_message,
    logprobs_messages,
    model_message,
    response_message,
    timings_message,
)

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Tell = Callable[[Chunk], Awaitable[None]]
_Result = TypeVar("_Result")

# A long message is read by another thread: nothing slower than a millisecond on the event loop.
MAX_INLINE_BYTES = 2048
# How long before a client's deadline a request is stopped: a share of its time, and at most.
MARGIN = 0.1
MAX_MARGIN_S = 0.1


class TextGeneration(pb_grpc.TextGenerationServicer):
    """`served` is None while the model is loading."""

    def __init__(
        self,
        desk: Desk,
        report: Callable[[Record], None],
        write_timeout_s: float,
        share_cache: bool = False,
    ) -> None:
        self._desk = desk
        self._report = report
        self._write_timeout_s = write_timeout_s
        self._share_cache = share_cache
        self._quotas = Quotas()
        self.served: Served | None = None

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with self._call("Generate", context) as record:
            served = self._ready()
            asked = await _read(read_generate, request, served, self._arrival(record, context))
            chunks = await self._collect(asked, served, record)
            return response_message(merge(chunks, asked.request.num_sequences), served.text)
        raise AssertionError("the call was aborted")

    async def GenerateStream(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        # It writes instead of yielding: a client that leaves during a write is noticed at once.
        async with self._call("GenerateStream", context) as record:
            served = self._ready()
            asked = await _read(read_generate, request, served, self._arrival(record, context))

            async def tell(chunk: Chunk) -> None:
                await self._write(chunk_message(chunk, served.text), context)

            await self._answer(asked, served, record, tell)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        async with self._call("Score", context) as record:
            served = self._ready()
            asked = await _read(read_score, request, served, self._arrival(record, context))
            chunks = await self._collect(asked, served, record)
            (whole,) = merge(chunks, 1)
            assert whole.finish is not None
            return pb.ScoreResponse(
                log_likelihood=sum(each.logprob or 0.0 for each in whole.prompt_logprobs),
                tokens=logprobs_messages(whole.prompt_logprobs, served.text),
                timings=timings_message(whole.finish.timings),
                request_id=record.request_id,
            )
        raise AssertionError("the call was aborted")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with self._call("Tokenize", context):
            return await _read(_tokenize, request, _text(self._ready()))
        raise AssertionError("the call was aborted")

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        async with self._call("Detokenize", context):
            return await _read(_detokenize, request, self._ready())
        raise AssertionError("the call was aborted")

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.Model:
        async with self._call("GetModel", context):
            return model_message(self._ready())
        raise AssertionError("the call was aborted")

    def _ready(self) -> Served:
        if self.served is None:
            raise UnavailableError("the server is loading its model. Try again in a few seconds")
        return self.served

    @asynccontextmanager
    async def _call(self, method: str, context: Context) -> AsyncIterator[Record]:
        """Every call ends once, with a status of its own, and is accounted for."""
        caller = _caller(context)
        record, error = Record(method, caller.name), None
        try:
            with self._quotas.call(caller):
                yield record
        except RequestError as raised:
            error = raised
            record.outcome = status_name(error)
        except asyncio.CancelledError:
            record.outcome = "DEADLINE_EXCEEDED" if _is_past(context) else "CANCELLED"
            raise
        except Exception:
            logger.exception("a bug in %s, request %s", method, record.request_id)
            error = StepError(f"a bug in the server; its log has more under {record.request_id}")
            record.outcome = status_name(error)
        finally:
            record.close()
            self._report(record)
        if error is not None:
            await context.abort_with_status(grpc_status(error, record.request_id))

    def _arrival(self, record: Record, context: Context) -> Arrival:
        return Arrival(
            request_id=record.request_id,
            deadline_s=_deadline_s(context),
            owner=record.caller,
            cache_scope="" if self._share_cache else record.caller,
        )

    async def _answer(self, asked: Asked, served: Served, record: Record, tell: Tell) -> None:
        answer = Answer(asked, served.text)
        with self._desk.serve(asked.request) as inbox:
            while not answer.is_over:
                chunks = answer.take(await inbox.take())
                for sequence in answer.stopped:
                    self._desk.stop(asked.request.request_id, sequence)
                answer.stopped.clear()
                for chunk in chunks:
                    if chunk.finish is not None:
                        record.note(chunk.finish)
                    await tell(chunk)

    async def _collect(self, asked: Asked, served: Served, record: Record) -> list[Chunk]:
        chunks: list[Chunk] = []

        async def tell(chunk: Chunk) -> None:
            chunks.append(chunk)

        await self._answer(asked, served, record, tell)
        return chunks

    async def _write(self, message: pb.GenerateChunk, context: Context) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await context.write(message)
        except TimeoutError:
            reason = f"nothing was read for {self._write_timeout_s:g} s"
            raise SlowReaderError(reason) from None


async def _read(read: Callable[..., _Result], message: Message, *rest: Any) -> _Result:
    if message.ByteSize() <= MAX_INLINE_BYTES:
        return read(message, *rest)
    return await asyncio.to_thread(read, message, *rest)


def _deadline_s(context: Context) -> float | None:
    """A little before the client's own, so that what was made still gets there."""
    left_s = cast("float | None", context.time_remaining())  # the stub forgets None
    if left_s is None:
        return None
    return time.monotonic() + left_s - min(MAX_MARGIN_S, MARGIN * left_s)


def _is_past(context: Context) -> bool:
    left_s = cast("float | None", context.time_remaining())
    return left_s is not None and left_s <= 0


def _caller(context: Context) -> Caller:
    """By its API key; without those, by its certificate, if it had to show one."""
    caller, identities = CALLER.get(), context.peer_identities()
    if caller is ANYBODY and identities:
        return Caller(name=b",".join(identities).decode("utf-8", "replace"))
    return caller


def _text(served: Served) -> Text:
    if served.text is None:
        raise UnsupportedError("this model has no tokenizer: it takes and gives token ids only")
    return served.text


def _tokenize(message: pb.TokenizeRequest, text: Text) -> pb.TokenizeResponse:
    begin = message.add_special_tokens if message.HasField("add_special_tokens") else True
    ids = text.encode(message.text, begin)
    return pb.TokenizeResponse(token_ids=ids, tokens=[text.piece(id) for id in ids])


def _detokenize(message: pb.DetokenizeRequest, served: Served) -> pb.DetokenizeResponse:
    check_ids("token_ids", message.token_ids, served)
    skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
    return pb.DetokenizeResponse(text=_text(served).decode(message.token_ids, skip))
